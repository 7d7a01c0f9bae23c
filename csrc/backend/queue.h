// The operations of one group. They run one at a time, in the order of submission: in the caller if nothing is queued
// before, in a thread that waits for a result, or in a thread that is started when first needed. Not a general executor:
// engine/executor.h is the engine's. Used by backend.cpp.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace gossamer {

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  // Neither a task nor its epilogue may throw. The epilogue, if a task returns one, runs once the next task may run. So it
  // may wait for operations of this queue, and drop the last reference to the queue's owner.
  using Epilogue = std::function<void()>;
  using Task = std::function<Epilogue()>;

  // `now`: the caller is going to wait, so the task runs in its thread if nothing is queued before it.
  void submit(Task task, bool now);
  // As submit(task, true), but the caller does the task's work itself: nothing of this queue runs until leave(). Returns
  // false, and does nothing, if something is queued before it.
  bool enter();
  void leave();
  // Runs queued tasks in this thread until `done()`, or sleeps while another thread runs one.
  void help(const std::function<bool()>& done);
  // Returns after all queued tasks have run; takes no more. Epilogues may still be running.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  void run_first(Lock& lock, bool looping = false);
  void require_looper();
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool running_ = false;
  bool closed_ = false;
  int loopers_ = 0;  // threads of the queue that are not in an epilogue
};

}  // namespace gossamer
