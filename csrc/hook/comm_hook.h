// A communication hook of torch's own DDP, in C++: takes a bucket of its Reducer, lets a worker run the engine's bucket works
// over it, and completes the future that the Reducer waits for at the end of backward. The Reducer decides which parameters
// travel together, and decides anew after the first step: the hook then asks for other buckets.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "backend/gil.h"
#include "engine/work.h"
#include "engine/worker.h"

namespace gossamer {

class CommHook {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  using Works = std::vector<std::pair<std::shared_ptr<Bucket>, std::shared_ptr<BucketWork>>>;
  // Makes our buckets, and their works, for a bucket of DDP: `numbers` are its parameters, `dtype` their gradients' dtype.
  // `anew`: DDP has other buckets now, and the hook has dropped all of ours. Called on the worker.
  using Arrange = std::function<Works(int64_t index, const std::vector<int64_t>& numbers,
                                      at::ScalarType dtype, bool anew)>;

  // `params` are all parameters that a bucket may hold, in an order that all ranks share. `control`: see Worker.
  CommHook(CommunicatorPtr comm, CommunicatorPtr control, std::vector<at::Tensor> params, Arrange arrange);
  ~CommHook() { close(); }

  // Queues the bucket, and does not wait for other ranks (see Worker::keep_order); any thread. The future will hold `result`,
  // or the error.
  FuturePtr reduce_bucket(const c10d::GradBucket& bucket, c10::IValue result);

  // The same for one parameter's gradient, in place.
  FuturePtr reduce_gradient(const at::Tensor& grad, const at::Tensor& param, c10::IValue result);

  // Waits until everything queued is done.
  void wait() { worker_.executor().wait(raise_interrupt); }

  // Called while nothing is queued: the next backward makes the buckets anew.
  void forget() { arranged_.clear(); }

  int64_t steps() const { return step_ + 1; }  // backward passes begun
  void set_steps(int64_t steps);

  // Ends the worker. Ranks that wait for this one in an unfinished operation get an error soon. Idempotent.
  void close();

 private:
  struct Message {  // a bucket on its way to the worker
    int64_t step;
    int64_t index;
    at::Tensor buffer;  // [numel]
    std::vector<int64_t> offsets;
    std::vector<int64_t> numbers;
    std::vector<bool> unused;  // this rank has no gradient
  };
  struct Part {  // of a bucket of DDP
    std::shared_ptr<Bucket> bucket;
    std::shared_ptr<BucketWork> work;
    std::vector<size_t> positions;  // of its parameters in DDP's
  };
  struct Arranged {
    std::vector<int64_t> numbers;
    at::ScalarType dtype;
    std::vector<Part> parts;
  };

  int64_t number_of(const at::Tensor& param, int64_t index) const;
  FuturePtr submit(Message message, c10::IValue result);
  void run(const Message& message);
  const std::vector<Part>& parts_of(const Message& message);

  std::vector<at::Tensor> params_;
  std::unordered_map<const c10::TensorImpl*, int64_t> numbers_;
  Arrange arrange_;

  std::mutex mutex_;
  std::atomic<int64_t> step_{-1};
  std::unordered_set<int64_t> seen_;  // parameters of this step

  // The worker's; other threads use it only while the worker has nothing to do.
  std::map<int64_t, Arranged> arranged_;  // by the number of DDP's bucket
  std::exception_ptr failure_;            // nothing is sent after it

  std::atomic<int64_t> unfinished_{0};  // messages whose future is not complete; its task ends a moment later
  std::atomic<bool> closed_{false};
  Worker worker_;  // last: its thread ends before the members that it uses
};

// The hook that a Reducer calls from autograd's thread, without the GIL.
class NativeCommHook : public c10d::CommHookInterface {
 public:
  using FuturePtr = CommHook::FuturePtr;
  explicit NativeCommHook(std::shared_ptr<CommHook> hook) : hook_(std::move(hook)) {}
  FuturePtr runHook(c10d::GradBucket& bucket) override {
    return hook_->reduce_bucket(bucket, bucket.getBuffer());
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  std::shared_ptr<CommHook> hook_;
};

}  // namespace gossamer
