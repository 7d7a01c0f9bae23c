// A backend as in backend.h whose ranks are processes: values go through a backend for CPU tensors, the wire. It fails as
// NCCL does: where a rank has died, an operation on the device never ends until abort(), and then has left anything in its
// tensors.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "backend.h"

namespace late {

class Wired : public Backend {
 public:
  explicit Wired(c10::intrusive_ptr<c10d::Backend> wire)
      : Backend(wire->getRank(), wire->getSize()), wire_(std::move(wire)) {
    Device::instance().asking_is_waiting();
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    c10d::AllreduceOptions given;
    given.reduceOp = options.reduceOp;
    const auto begin = [given](c10d::Backend& wire, Tensors& x) { return wire.allreduce(x, given); };
    return send_one(options.asyncOp, tensors, begin);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    c10d::BroadcastOptions given;
    given.rootRank = options.rootRank;
    const auto begin = [given](c10d::Backend& wire, Tensors& x) { return wire.broadcast(x, given); };
    return send_one(options.asyncOp, tensors, begin);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& x, const c10d::AllgatherOptions& options) override {
    const auto begin = [out = host(out), x = host(x)](c10d::Backend& wire) mutable {
      return wire._allgather_base(out, x, {});
    };
    return send(options.asyncOp, {out, x}, begin);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& x, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& x_sizes, const c10d::AllToAllOptions& options) override {
    const auto begin = [out = host(out), x = host(x), out_sizes, x_sizes](c10d::Backend& wire) mutable {
      return wire.alltoall_base(out, x, out_sizes, x_sizes, {});
    };
    return send(options.asyncOp, {out, x}, begin);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return send_one(true, tensors, [=](c10d::Backend& wire, Tensors& x) { return wire.send(x, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return send_one(true, tensors, [=](c10d::Backend& wire, Tensors& x) { return wire.recv(x, from, tag); });
  }

  // Messages of a group are on their way at the same time.
  void startCoalescing() override { messages_.emplace(); }
  WorkPtr endCoalescing() override {
    auto [tensors, begins] = *std::exchange(messages_, std::nullopt);
    return queue_sends(true, std::move(tensors), std::move(begins));
  }

  // A seeded fault: as the device begins the operation with this number, the process dies.
  inline static std::atomic<int64_t> begun{0}, last_begun{-1};

 private:
  using Begin = std::function<WorkPtr(c10d::Backend&)>;

  // begin(wire, x), where x has the one tensor as the wire takes it.
  template <class BeginOne>
  WorkPtr send_one(bool async, const Tensors& tensors, BeginOne begin) {
    return send(async, tensors, [x = Tensors{host(tensors[0])}, begin](c10d::Backend& wire) mutable {
      return begin(wire, x);
    });
  }

  WorkPtr send(bool async, Tensors tensors, Begin begin) {
    if (!messages_) return queue_sends(async, std::move(tensors), {std::move(begin)});
    messages_->first.insert(messages_->first.end(), tensors.begin(), tensors.end());
    messages_->second.push_back(std::move(begin));
    return {};
  }

  // They begin when the stream comes to them, and the stream waits until they have ended well.
  WorkPtr queue_sends(bool async, Tensors tensors, std::vector<Begin> begins) {
    launch(tensors[0]);
    auto is_begun = std::make_shared<bool>(false);
    auto ended = std::make_shared<std::atomic<bool>>(false);
    const auto ready = [wire = wire_, begins = std::move(begins), is_begun, ended, aborted = aborted_] {
      if (*aborted || *ended) return true;
      if (std::exchange(*is_begun, true)) return false;
      if (begun++ == last_begun) ::kill(::getpid(), SIGKILL);
      std::thread(
          [wire, begins, ended] {  // Gloo asks Python where it is called from, which may wait for the device
            try {
              std::vector<WorkPtr> works;
              for (const auto& begin : begins) works.push_back(begin(*wire));
              for (const auto& work : works) work->wait();
              *ended = true;
            } catch (const std::exception&) {
              // A rank is gone.
            }
          })
          .detach();
      return false;
    };
    const auto end = [aborted = aborted_, memory = tensors[0].data_ptr(), bytes = tensors[0].nbytes()] {
      if (*aborted) std::memset(memory, kScribble, bytes);
    };
    const auto push = [&](StreamId stream) {
      // As in NCCL, operations of one communicator run in the order of their launches, also on different streams.
      if (last_ != nullptr && last_->stream != stream) Device::instance().block(stream, last_);
      // An operation of another rank may wait for these: so they are not late.
      Device::instance().push_when(stream, ready, end, [] { return true; });
      last_ = Device::instance().record(stream);
    };
    return queue(async, push, std::move(tensors));
  }

  const c10::intrusive_ptr<c10d::Backend> wire_;
  MarkPtr last_;  // after the last launch
  std::optional<std::pair<Tensors, std::vector<Begin>>> messages_;
};

}  // namespace late
