// The operations of one group, run one at a time in the order of submission: by the caller where nothing is before
// it, by whoever waits for a result, else by a thread that is started when first needed. Not an executor for
// anything else: engine/executor.h is the engine's. Used by backend.cpp.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace gossamer {

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  // Neither a task nor what it returns may throw. The latter, if anything, runs once the next task may: it may wait for
  // operations of this queue, and give up the last reference to what owns it.
  using Epilogue = std::function<void()>;
  using Task = std::function<Epilogue()>;

  // `now`: the caller is going to wait, so the task runs in its thread if nothing is queued before it.
  void submit(Task task, bool now);
  // As submit(task, true), but the caller is the task: nothing of this queue runs until leave(). False, and nothing has
  // happened, where something is before it.
  bool enter();
  void leave();
  // Runs queued tasks in this thread until `done()`, or sleeps while another thread runs one.
  void help(const std::function<bool()>& done);
  // After what is queued has run, no more tasks are taken. Epilogues may still be running.
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
  int loopers_ = 0;  // threads of the queue, but for those in an epilogue
};

}  // namespace gossamer
