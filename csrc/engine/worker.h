// The worker of one engine: its executor, the errors that come out of tasks and waits, and whether the engine still
// goes. Errors say their place, and what the stall watch (python/gossamer/observe/stall.py, on a thread of its own) has
// found out about a wait that lasts long. It knows nothing of gradients.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "engine/executor.h"
#include "errors.h"

namespace gossamer {

class Worker {
 public:
  // `control` is a CPU group of the same ranks: the same object where `comm` is one.
  Worker(CommunicatorPtr comm, CommunicatorPtr control);
  Communicator& comm() const { return *comm_; }
  Communicator& control() const { return *control_; }
  Executor& executor() { return executor_; }

  // Queues a task behind everything before it, on the side stream behind the caller's stream. All ranks submit the
  // same. Its exception, with `what` and the step in its text, comes out of the next wait(), or of the backward that
  // ends next.
  void submit(std::function<void()> task, const std::string& what);
  void wait();  // for everything submitted; what follows on the current stream comes after it

  void run_guarded(const std::string& what, const std::function<void()>& task);  // the body of such a task
  void finish(const std::function<void()>& last);  // wait() of an engine that may have ended, and then `last`

  int64_t step() const { return step_; }  // synchronised backwards that have ended
  void set_step(int64_t step) { step_ = step; }
  std::string place() const;  // "rank 3/8 step 120"

  void check_alive() const;  // throws the error that ended this engine, if one did
  bool closed() const { return closed_; }
  bool broken() const { return broken_.has_value(); }

  // Ends this engine. give_up(): for an error that it has no part in; `announce`: lets the other ranks know, who have
  // not had it. stop(): it has been closed; `in_backward`: others may wait for this rank, and are told `what` it did.
  void break_off(const std::string& why) { broken_ = why; }
  void give_up(const std::string& why, bool announce);
  void mark_closed() { closed_ = true; }
  void stop(bool in_backward,
            const std::string& what = "closed or deleted its model in the middle of a step");
  void announce_failure(const std::string& what = Communicator::kFailed) noexcept;

  // From any thread: what is known of a wait that lasts too long, which the error that ends it says too; empty if none
  // does any more. `stop`: ends the wait, of the others for this rank as well, and this engine.
  void tell_stall(const std::string& facts, bool stop);

 private:
  [[noreturn]] void rethrow_with_context(const std::string& context);
  [[noreturn]] void fail_wait();  // in a catch
  void look_around() const;       // while a thread waits: throws if it must not any more
  std::string stall_facts() const;

  CommunicatorPtr comm_;
  CommunicatorPtr control_;
  std::atomic<int64_t> step_{0};
  bool closed_ = false;
  std::optional<std::string> broken_;
  mutable std::mutex stall_mutex_;
  std::string stall_;
  std::atomic<bool> stopped_{false};
  Executor executor_;
};

}  // namespace gossamer
