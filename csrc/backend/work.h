// One operation of the backend "gossamer" as torch sees it: a c10d::Work with a future. Made by backend.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

namespace gossamer {

// What works hold: one list of tensors per output list of the operation. Their future holds the list, or the lists.
using Outputs = std::vector<std::vector<at::Tensor>>;
c10::intrusive_ptr<c10::ivalue::Future> new_future(const Outputs& outputs,
                                                   std::vector<c10::Device> devices = {});
// On an accelerator: as soon as the current stream is so far.
void complete(c10::ivalue::Future& future, const Outputs& outputs);
std::vector<at::Tensor> all_of(const Outputs& outputs);

class GossamerWork : public c10d::Work {
 public:
  // `help(work)` may run the tasks queued before the work, and the work itself, in the thread that waits for the work.
  GossamerWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
               Outputs outputs, uint64_t sequence, std::function<void(GossamerWork&)> help);

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

  Outputs outputs_;
  uint64_t sequence_;
  std::function<void(GossamerWork&)> help_;
  std::function<void()> on_abort_;
  int source_ = -1;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using WorkPtr = c10::intrusive_ptr<GossamerWork>;

}  // namespace gossamer
