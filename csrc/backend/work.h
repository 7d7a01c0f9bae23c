// One operation of the backend "gossamer" as torch sees it: a c10d::Work with a future. Made by backend.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

namespace gossamer {

class GossamerWork : public c10d::Work {
 public:
  // `help(work)` may run the tasks queued before the work, and the work itself, in the thread that waits for the work.
  // `outputs` are what result() and the future hold, one list per output list of the operation.
  GossamerWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
               std::vector<std::vector<at::Tensor>> outputs, uint64_t sequence,
               std::function<void(GossamerWork&)> help);

  bool wait(std::chrono::milliseconds timeout) override;  // zero: no limit
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  int sourceRank() const override;
  void abort() override;

  // Called once, by the thread that ran the operation; wakes the waiters. The function that it returns, if any, completes
  // the future, whose callbacks may do anything: call it where nothing waits for this thread.
  std::function<void()> complete(std::exception_ptr error, int source = -1);
  void on_abort(std::function<void()> action) { on_abort_ = std::move(action); }

 private:
  void settle(std::exception_ptr error);

  std::vector<std::vector<at::Tensor>> outputs_;
  uint64_t sequence_;
  std::function<void(GossamerWork&)> help_;
  std::function<void()> on_abort_;
  int source_ = -1;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using WorkPtr = c10::intrusive_ptr<GossamerWork>;

}  // namespace gossamer
