// The operations of one group, run one at a time in the order of submission: by the caller where nothing is before
// it, by whoever waits for a result, else by a thread that is started when first needed. Not an executor for
// anything else: engine/executor.h is the engine's. Used by backend.cpp.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace gossamer {

class Queue {
 public:
  using Task = std::function<void()>;  // must not throw

  ~Queue();
  // `now`: the caller is going to wait, so the task runs in its thread if nothing is queued before it.
  void submit(Task task, bool now);
  // Runs queued tasks in this thread until `done()`, or sleeps while another thread runs one.
  void help(const std::function<bool()>& done);
  // After what is queued has run, no more tasks are taken.
  void close();

 private:
  void run_first(std::unique_lock<std::mutex>& lock);
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool running_ = false;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace gossamer
