// A c10d backend for the simulated device that orders its work as torch's ProcessGroupNCCL does. asyncOp=true: on a stream of
// its own, and wait() makes the caller's current stream wait for it. asyncOp=false: on the current stream, without a Work.
// Between startCoalescing() and endCoalescing() nothing of any backend starts, as ncclGroupStart() has it. Destroyed before shutdown(), it destroys what is in flight. All ranks are
// equal: what this rank would receive from another is what it has itself.
#pragma once

#include <ATen/ops/from_blob.h>
#include <c10/util/thread_name.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "streams.h"

namespace late {

StreamId current_stream();

// The same memory as a CPU tensor, which does not keep it alive.
inline at::Tensor on_host(const at::Tensor& x) {
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

class Work : public c10d::Work {
 public:
  Work(MarkPtr end, std::vector<at::Tensor> tensors) : end_(std::move(end)), tensors_(std::move(tensors)) {}
  bool wait(std::chrono::milliseconds) override {
    Device::instance().block(current_stream(), end_);
    tensors_.clear();
    return true;
  }
  bool isCompleted() override { return Device::instance().is_done(end_); }

 private:
  MarkPtr end_;
  std::vector<at::Tensor> tensors_;  // kept until the caller's stream waits
};

class Backend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  Backend(int rank, int size) : c10d::Backend(rank, size) {}
  ~Backend() override {
    if (!shut_down_) *aborted_ = true;
  }
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { group().emplace(); }
  WorkPtr endCoalescing() override {
    auto& device = Device::instance();
    const auto starts = *std::exchange(group(), std::nullopt);
    device.block(stream_, device.record(current_stream()));
    for (const auto& start : starts) start();
    return c10::make_intrusive<Work>(device.record(stream_), Tensors());
  }

  void shutdown() override {
    Device::instance().synchronize();
    shut_down_ = true;
    ++shutdowns;
  }
  void abort() override { *aborted_ = shut_down_ = true; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  bool is_aborted() const { return *aborted_; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const bool sums = options.reduceOp == c10d::ReduceOp::SUM;
    const auto call = [x = host(tensors[0]), factor = sums ? getSize() : 1]() mutable { x.mul_(factor); };
    return start(options.asyncOp, tensors, tensors[0], call);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start(options.asyncOp, tensors, tensors[0], [] {});
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& x, const c10d::AllgatherOptions& options) override {
    const auto call = [rows = host(out).view({getSize(), -1}), x = host(x).view({1, -1})]() mutable {
      rows.copy_(x);
    };
    return start(options.asyncOp, {out, x}, out, call);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& x,
                               const c10d::ReduceScatterOptions& options) override {
    const auto call = [out = host(out).view({-1}), own = host(x).view({getSize(), -1})[getRank()],
                       n = getSize()]() mutable { out.copy_(own).mul_(n); };
    return start(options.asyncOp, {out, x}, out, call);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& x, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions& options) override {
    const auto call = [rows = host(out).view({getSize(), -1}),
                       own = host(x).view({getSize(), -1})[getRank()]]() mutable { rows.copy_(own); };
    return start(options.asyncOp, {out, x}, out, call);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return each(tensors.size(), [&](size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& xs,
                                          const c10d::AllgatherOptions& options) override {
    return each(outs.size(), [&](size_t i) { return _allgather_base(outs[i], xs[i], options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& xs,
                                          const c10d::ReduceScatterOptions& options) override {
    return each(outs.size(), [&](size_t i) { return _reduce_scatter_base(outs[i], xs[i], options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& xs, const c10d::AllgatherOptions& options) override {
    return copies(options.asyncOp, xs[0], outs[0]);
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& xs,
                         const c10d::ReduceScatterOptions& options) override {
    const auto call = [out = host(outs[0]), own = host(xs[0][getRank()]), n = getSize()]() mutable {
      out.copy_(own).mul_(n);
    };
    return start(options.asyncOp, {outs[0], xs[0][getRank()]}, outs[0], call);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto call = [x = host(tensors[0]), n = getSize()]() mutable { x.mul_(n); };
    return start(options.asyncOp, tensors, tensors[0], call);
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& xs, const c10d::GatherOptions& options) override {
    return copies(options.asyncOp, xs[0], outs[0]);
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& xs, const c10d::ScatterOptions& options) override {
    return copies(options.asyncOp, xs[0][getRank()], {outs[0]});
  }
  WorkPtr alltoall(Tensors& outs, Tensors& xs, const c10d::AllToAllOptions& options) override {
    return copies(options.asyncOp, xs[getRank()], outs);
  }
  // A message comes from a rank that has sent what this one has sent last.
  WorkPtr send(Tensors& tensors, int, int) override {
    return start(true, tensors, tensors[0], [x = host(tensors[0]), sent = sent_]() { *sent = x.clone(); });
  }
  WorkPtr recv(Tensors& tensors, int, int) override {
    return start(true, tensors, tensors[0],
                 [x = host(tensors[0]), sent = sent_]() mutable { x.copy_(*sent); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    ++barriers;
    Device::instance().synchronize(current_stream());
    return {};
  }

  int64_t own_stream_calls() const { return own_stream_calls_; }
  inline static std::atomic<int> shutdowns{0};
  inline static std::atomic<int> barriers{0};
  inline static std::atomic<int64_t> operations{0};  // that all backends have queued on the device

  // The operations of all backends in the order of their launches: the backend's number, from 0, and the bytes.
  static std::vector<std::pair<int64_t, int64_t>> take_launches() {
    const std::lock_guard<std::mutex> lock(launches_mutex);
    return std::exchange(launches, {});
  }
  // A seeded delay: milliseconds for which threads of Gossamer's sleep before each launch.
  inline static std::atomic<int> worker_sleep{0};

 protected:
  void launch(const at::Tensor& x) {
    ++operations;
    if (worker_sleep > 0 && c10::getThreadName() == "gossamer")
      std::this_thread::sleep_for(std::chrono::milliseconds(worker_sleep));
    const std::lock_guard<std::mutex> lock(launches_mutex);
    launches.emplace_back(number_, x.nbytes());
  }
  static at::Tensor host(const at::Tensor& x) { return x.is_cpu() ? x : on_host(x); }

  using Group = std::vector<std::function<void()>>;
  static std::optional<Group>& group() {
    static thread_local std::optional<Group> group;
    return group;
  }

  template <class One>
  static WorkPtr each(size_t count, One one) {
    WorkPtr last;
    for (size_t i = 0; i < count; ++i) last = one(i);
    return last;
  }

  WorkPtr copies(bool async, const at::Tensor& x, const Tensors& outs) {
    return each(outs.size(), [&](size_t i) {
      const auto call = [out = host(outs[i]), x = host(x)]() mutable { out.copy_(x); };
      return start(async, {outs[i], x}, outs[i], call);
    });
  }

  template <class Call>
  WorkPtr start(bool async, Tensors tensors, const at::Tensor& out, Call call) {
    auto& device = Device::instance();
    if (out.is_cpu()) {
      call();
      if (!async) return {};
      return c10::make_intrusive<Work>(device.record(current_stream()), Tensors());
    }
    launch(out);
    const auto task = [call, aborted = aborted_, memory = out.data_ptr(), bytes = out.nbytes()]() mutable {
      if (*aborted) {
        std::memset(memory, kScribble, bytes);
      } else {
        call();
      }
    };
    if (group()) {
      const StreamId stream = async ? stream_ : current_stream();
      group()->push_back([stream, task] { Device::instance().push(stream, task); });
      return {};
    }
    return queue(async, [&](StreamId stream) { device.push(stream, task); }, std::move(tensors));
  }

  // push(stream) queues an operation on it.
  template <class Push>
  WorkPtr queue(bool async, Push push, Tensors tensors) {
    auto& device = Device::instance();
    if (!async) {
      push(current_stream());
      return {};
    }
    ++own_stream_calls_;
    device.block(stream_, device.record(current_stream()));
    push(stream_);
    return c10::make_intrusive<Work>(device.record(stream_), std::move(tensors));
  }

  inline static std::mutex launches_mutex;
  inline static std::vector<std::pair<int64_t, int64_t>> launches;
  inline static std::atomic<int64_t> backends{0};

  const int64_t number_ = backends++;
  const StreamId stream_ = Device::instance().new_stream();
  const std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> shut_down_{false};
  std::atomic<int64_t> own_stream_calls_{0};
  std::chrono::milliseconds timeout_{0};
  const std::shared_ptr<at::Tensor> sent_ = std::make_shared<at::Tensor>();
};

}  // namespace late
