// One worker thread that runs tasks in the order they were submitted, so that every rank issues its
// collectives in one order whatever order gradients arrive in. On an accelerator the thread works on a
// high-priority side stream; the device's own events order it against the streams of backward.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include <unistd.h>

namespace gossamer {

class Executor {
 public:
  explicit Executor(c10::Device device);
  ~Executor() { stop(); }

  // Drops what has not begun, lets the running task end, and ends the thread. In a forked child, where there is
  // no such thread, it only forgets it. Idempotent.
  void stop();
  bool busy();  // something was submitted that has not ended

  void submit(std::function<void()> task);

  // The same, behind what the caller's current stream holds.
  void submit_behind_current(std::function<void()> task);

  // Returns when every task has run; rethrows the first exception. After one, later tasks are dropped until it
  // has been rethrown. The caller's current stream then waits for the side stream. `meanwhile` is called ten
  // times a second and may end the wait by throwing.
  void wait(const std::function<void()>& meanwhile);

  std::optional<c10::Stream> side_stream() const { return side_stream_; }

 private:
  void loop();
  void run_one(std::unique_lock<std::mutex>& lock);

  c10::Device device_;
  std::optional<c10::Stream> side_stream_;
  std::mutex mutex_;
  std::condition_variable wake_worker_;
  std::condition_variable wake_waiter_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
  bool stop_ = false;
  std::exception_ptr failure_;
  pid_t owner_ = getpid();
  std::thread thread_;
};

}  // namespace gossamer
