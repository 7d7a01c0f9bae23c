// The native part of a communication hook of torch's own DDP: takes a bucket of its Reducer, averages it on a worker
// thread, and completes the future that the Reducer waits for at the end of backward. It keeps no bucket of its own:
// which parameters travel together is the Reducer's business, and it changes its mind after the first step. What a
// codec leaves out is kept by parameter, and where a block of a parameter is summed depends on that parameter alone.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "collectives/two_shot.h"
#include "engine/executor.h"
#include "flat/flat.h"

namespace gossamer {

// How the gradients of some parameters become their mean.
struct HookMethod {
  std::optional<CodecChoice> codec;  // the native two-shot through it; without one, `call`
  bool feedback = false;             // what the codec leaves out is added to the next gradient
  int64_t unit = 1;                  // elements that stay together: the codec's blocks
  std::function<void(const at::Tensor& flat, const std::optional<at::Tensor>& error, uint64_t nonce)> call;
};

class CommHook {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  // Averages whole buckets: gradients in the shapes of their parameters, whose numbers are given.
  using Whole = std::function<void(int64_t step, int64_t index, const std::vector<int64_t>& numbers,
                                   const std::vector<at::Tensor>& gradients)>;

  // `params` are all that a bucket may hold, in an order that all ranks share; `method_of` gives each a method. With
  // `whole` there are no methods.
  CommHook(CommunicatorPtr comm, std::vector<at::Tensor> params, std::vector<HookMethod> methods,
           std::vector<int64_t> method_of, Whole whole);
  ~CommHook() { close(); }

  // Queues the bucket and returns at once; any thread. The future holds `result`, or the error.
  FuturePtr reduce_bucket(const c10d::GradBucket& bucket, c10::IValue result);

  // The same for one parameter's gradient, in place.
  FuturePtr reduce_gradient(const at::Tensor& grad, const at::Tensor& param, c10::IValue result);

  // Until everything queued is done.
  void wait();

  // What was left out, by parameter: empty where there is nothing. In the order of its memory, float32 or float64.
  std::vector<std::optional<at::Tensor>> errors();
  void set_errors(std::vector<std::optional<at::Tensor>> errors);

  int64_t steps() const { return step_ + 1; }  // backward passes begun
  void set_steps(int64_t steps);

  // Ends the worker; ranks that wait for this one in something unfinished get an error soon. Idempotent.
  void close();

 private:
  struct Piece {    // of a parameter: what one rank sums
    int64_t row;    // that rank's, in the flat memory
    int64_t begin;  // in the parameter
    int64_t numel;
    int64_t offset;  // in the flat memory
  };
  struct Member {
    size_t position;  // in the bucket
    std::vector<Piece> pieces;
  };
  struct Group {  // parameters of a bucket that share a method
    size_t method;
    std::vector<Member> members;
    std::vector<flat::Segment> padding;
    at::Tensor flat;
    at::Tensor error;  // undefined without feedback
  };
  struct Layout {
    std::vector<int64_t> numbers;
    at::ScalarType dtype;
    std::vector<Group> groups;
  };
  struct Message {  // a bucket on its way to the worker
    int64_t step;
    int64_t index;
    at::Tensor buffer;  // [numel]
    std::vector<int64_t> offsets;
    std::vector<int64_t> numbers;
    std::vector<bool> unused;  // this rank has no gradient
  };

  int64_t number_of(const at::Tensor& param, int64_t index) const;
  FuturePtr submit(Message message, c10::IValue result);
  void run(const Message& message);
  void run_group(const Message& message, Group& group, uint64_t nonce);
  void run_whole(const Message& message);
  Layout& layout_of(const Message& message);
  Group place(const Message& message, size_t method, std::vector<size_t> positions);
  void store_errors();
  void load_errors(const Layout& layout, Group& group);
  std::string place_of(const Message& message) const;

  CommunicatorPtr comm_;
  std::vector<at::Tensor> params_;
  std::unordered_map<const c10::TensorImpl*, int64_t> numbers_;
  std::vector<HookMethod> methods_;
  std::vector<int64_t> method_of_;
  std::vector<int64_t> first_unit_;  // of each parameter, among all of its method
  Whole whole_;

  std::mutex mutex_;
  std::atomic<int64_t> step_{-1};
  std::unordered_set<int64_t> seen_;  // parameters of this step

  // The worker's, or anyone's while it has nothing to do.
  std::map<int64_t, Layout> layouts_;
  std::vector<bool> placed_;        // the parameter is in a layout
  std::vector<at::Tensor> errors_;  // of parameters that are in none
  std::vector<Scratch> scratches_;
  std::exception_ptr failure_;  // nothing is sent after it

  bool closed_ = false;
  Executor executor_;  // last: its thread ends before what it works on
};

// What a Reducer calls from autograd's thread, without the GIL.
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
