// The worker of one engine: its executor, the errors of its tasks and waits, and whether the engine still runs. Errors name
// their place, and what the stall watch has found about a long wait. (The stall watch is Python's, gossamer.observe, on a
// thread of its own.) It knows nothing of gradients.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "engine/executor.h"
#include "errors.h"

namespace gossamer {

class Worker {
 public:
  // `control`: a CPU group of the same ranks; the same object as `comm` if that is one.
  Worker(CommunicatorPtr comm, CommunicatorPtr control);
  Communicator& comm() const { return *comm_; }
  Communicator& control() const { return *control_; }
  Executor& executor() { return executor_; }

  // Queues a task after everything before it; on the side stream, after the caller's current stream. All ranks submit the
  // same tasks. The next wait(), or the backward that ends next, throws the task's exception, with `what` and the step in
  // its text.
  void submit(std::function<void()> task, const std::string& what);
  // NCCL wants one order of operations over all groups of a device, the same on all ranks. So where operations are only
  // queued on the device, this returns once the worker has queued what the tasks up to this number have, and the program's
  // own operations come after it. Elsewhere it returns at once.
  void keep_order(uint64_t last);
  void wait();  // for everything submitted; what follows on the current stream comes after it

  void run_guarded(const std::string& what, const std::function<void()>& task);  // the body of such a task
  void finish(const std::function<void()>& last);  // wait() of an engine that may have ended, and then `last`

  int64_t step() const { return step_; }  // synchronised backwards that have ended
  void set_step(int64_t step) { step_ = step; }
  std::string place() const;  // "rank 3/8 step 120"

  void check_alive() const;  // throws the error that ended this engine, if one did
  bool closed() const { return closed_; }
  bool broken() const { return broken_.has_value(); }

  // Ends this engine. give_up(): after an error from elsewhere; `announce` tells the other ranks, which have not had it.
  // stop(): the engine was closed; `unfinished`: others may wait for this rank, and are told `what` it did.
  void break_off(const std::string& why) { broken_ = why; }
  void give_up(const std::string& why, bool announce);
  // `why`: what errors say of a later use; empty: that it was closed.
  void mark_closed(std::string why);
  void stop(bool unfinished, const std::string& what = "closed or deleted its model in the middle of a step");
  void announce_failure() noexcept;
  // Another communicator of this model, which is told of failures too. Called before the first backward.
  void fails_with(CommunicatorPtr comm) { others_.push_back(std::move(comm)); }

  // Called from any thread. `facts`: what is known of a wait that lasts too long; the error that ends it repeats them; empty
  // once no wait does. `stop` ends the wait, also that of other ranks for this one, and the engine.
  void tell_stall(const std::string& facts, bool stop);

 private:
  [[noreturn]] void rethrow_with_context(const std::string& context);
  [[noreturn]] void fail_wait();  // in a catch
  void tell_own(const std::string& what) noexcept;
  void look_around() const;  // called while a thread waits: throws if the wait must end
  std::string stall_facts() const;

  CommunicatorPtr comm_;
  CommunicatorPtr control_;
  std::vector<CommunicatorPtr> others_;
  std::atomic<int64_t> step_{0};
  std::atomic<bool> closed_{false};
  std::string why_closed_;
  std::optional<std::string> broken_;
  mutable std::mutex stall_mutex_;
  std::string stall_;
  std::atomic<bool> stopped_{false};
  Executor executor_;
};

}  // namespace gossamer
