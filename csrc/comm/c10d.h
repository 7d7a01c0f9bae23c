// The communicator over any c10d backend (Gloo, NCCL, ...). Not a transport: each call is one call of the
// backend's own operation, with the bytes counted and failures turned into errors that name the silent ranks.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/across.h"
#include "comm/communicator.h"
#include "comm/turn.h"

namespace gossamer {

class GossamerBackend;

class C10dCommunicator : public Communicator {
 public:
  // `store` (may be null) serves the roll call after a failure. `name` is its key prefix, equal on all ranks. `ranks`: what
  // errors call the ranks, for a part of a larger group; empty: errors use the ranks' numbers in this group.
  C10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
                   c10::intrusive_ptr<c10d::Store> store, std::string name, std::vector<int> ranks = {});
  ~C10dCommunicator() override;

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  at::Device device() const override { return device_; }

  PendingPtr all_reduce(at::Tensor x, ReduceOp op) override;
  PendingPtr reduce_scatter(at::Tensor out, at::Tensor x, ReduceOp op) override;
  PendingPtr all_gather(at::Tensor out, at::Tensor x) override;
  PendingPtr all_to_all(at::Tensor out, at::Tensor x) override;
  PendingPtr all_to_all_unequal(at::Tensor out, at::Tensor x, std::vector<int64_t> out_bytes,
                                std::vector<int64_t> x_bytes) override;
  PendingPtr broadcast(at::Tensor x, int source) override;
  PendingPtr exchange(const std::vector<Swap>& swaps) override { return exchange("exchange", swaps); }
  bool takes_calls() const override { return uses_sockets() && store_; }
  void set_call(CallAcross* call) override { call_ = call; }
  bool reduces_every_integer() const override { return shared_memory_ != nullptr; }

  at::Tensor allocate(int64_t bytes) override;
  void set_timeout(std::chrono::milliseconds timeout) override { backend_->setTimeout(timeout); }
  void wait_on_host(std::chrono::milliseconds timeout) override {
    if (nccl_) host_timeout_ = timeout;
  }
  bool queues_on_device() const override { return nccl_ && !host_timeout_; }
  bool uses_sockets() const override { return gloo_ && device_.is_cpu(); }

  void announce_failure(const std::string& what = kFailed) noexcept override {
    tell("rank " + std::to_string(name_of(rank())) + " has " + what);
  }
  void tell(const std::string& text) noexcept override;
  std::string trouble() noexcept override;
  std::string capture_refusal() const override;
  void abort() override { nccl_ ? abort_on_device() : backend_->abort(); }
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return backend_; }

  // Waits for a work, and gives up once another rank of the group has failed.
  void wait(c10d::Work& work);
  void wait_for_device() override;

  // Keeps works that nobody will wait for, such as those queued after one that failed.
  void leave(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  // Throws PythonError(comm) for an operation that the backend refused or lost.
  [[noreturn]] void fail(const char* operation, int64_t bytes, const std::exception& error);

 private:
  // What is known about an error's cause, to be added to its message. The other ranks are told.
  std::string who_is_to_blame(const std::string& reason);
  // The ranks whose connection to this one is broken.
  std::vector<int> disconnected();
  int name_of(int rank) const { return ranks_.empty() ? rank : ranks_.at(static_cast<size_t>(rank)); }
  std::string place() const;  // "1/4", "2 of ranks 0, 2"
  std::string listed(const std::vector<int>& ranks) const;
  // Finds which ranks do not answer, through the store and not the broken backend. Waits a few seconds at most.
  std::string roll_call();

  template <class Start>
  PendingPtr start(const char* operation, int64_t bytes, int64_t bytes_to_peers, Start&& start,
                   std::function<void()> finish = {}, std::optional<int64_t> bytes_from_peers = {});
  PendingPtr exchange(const char* operation, const std::vector<Swap>& swaps);
  // all_to_all and all_gather as messages: rank i's part of `out` comes from it, and it gets x, or its part of x.
  std::vector<Swap> as_swaps(const at::Tensor& out, const at::Tensor& x) const;
  PendingPtr reduce_and_take_own(at::Tensor out, const at::Tensor& x, ReduceOp op);
  std::string key(const std::string& leaf) const;
  void require(const at::Tensor& x, const char* operation) const;
  void abort_on_device() noexcept;  // once
  bool leaves_unfinished() const;
  // Lets torch's NCCL backend finish what is in flight: its destructor aborts it. Nothing to do for other backends.
  void finish_nccl() noexcept;

  c10::intrusive_ptr<c10d::Backend> backend_;
  at::Device device_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  std::vector<int> ranks_;
  GossamerBackend* shared_memory_;  // backend_ if it is one; else null
  bool gloo_;
  bool nccl_;
  // False for NCCL, whose operations then run on the current stream and not on one of its own, which has a normal priority.
  // False where running an operation costs less than handing it to a thread.
  bool async_;
  std::optional<std::chrono::milliseconds> host_timeout_;  // see wait_on_host()
  std::once_flag aborting_;
  std::atomic<bool> gave_up_{false};
  std::atomic<bool> failed_{false};  // this rank has told the others so
  std::once_flag looking_;
  std::unique_ptr<Lookout> lookout_;  // ends waits for single messages
  CallAcross* call_ = nullptr;
  Turns turns_;
  std::mutex left_mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> left_;
  pid_t owner_ = getpid();
};

}  // namespace gossamer
