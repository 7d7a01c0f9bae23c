// One worker thread that runs tasks in the order of submission, so that every rank issues its collectives in one order,
// whatever order gradients arrive in. On an accelerator the thread uses a high-priority side stream; the device's own
// events order it against the streams of backward.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <unistd.h>

#include "comm/communicator.h"
#include "observe/recorder.h"

namespace gossamer {

struct ProfiledThread;  // engine/profiled.h

class Executor {
 public:
  // A task has ended once it has run: what it queued on a device may go on. With `until_done`, a communicator of tasks on its
  // device, a task has ended once the device has done it.
  explicit Executor(c10::Device device, CommunicatorPtr until_done = nullptr);
  ~Executor() { stop(); }

  // Drops the tasks that have not begun, lets the running one end, and ends the thread. In a forked child, which has no
  // such thread, and in a task that drops its own executor, it only forgets the thread. Idempotent.
  void stop();
  // Lets all tasks run, and then ends the thread. Returns at once; wait() and busy() still tell of the tasks.
  void finish();
  bool busy();     // something was submitted that has not ended
  bool running();  // something was submitted that has not run

  // Returns the task's number, from 1. `what` and `bucket` name the task for observers: the recorder, and through it a
  // trace or a profiler.
  uint64_t submit(std::function<void()> task, std::string what = "task", int64_t bucket = -1);

  // The same; the task runs after what the caller's current stream holds.
  uint64_t submit_behind_current(std::function<void()> task, std::string what = "task");

  // Returns when every task up to the number `last` has ended, by default all; rethrows the first exception. After an
  // exception, later tasks are dropped until it has been rethrown. Where tasks end before the device has done them, the
  // caller's current stream then waits for the side stream. `meanwhile` is called ten times a second, and may end the wait
  // by throwing.
  void wait(const std::function<void()>& meanwhile, std::optional<uint64_t> last = std::nullopt);
  // Returns when they have run or been dropped. Exceptions stay for wait(). No-op in a task.
  void wait_until_run(const std::function<void()>& meanwhile, uint64_t last);

  std::optional<c10::Stream> side_stream() const { return state_->side_stream; }
  observe::Recorder& recorder() const { return *state_->recorder; }
  std::shared_ptr<observe::Recorder> shared_recorder() const { return state_->recorder; }

 private:
  // Shared with the thread, which may outlive the executor. Tasks are never destroyed with the mutex held: their captures
  // may need the GIL, and the thread that holds the GIL may wait for the mutex.
  struct Task {
    std::function<void()> run;
    std::string what;
    int64_t bucket = -1;
    uint64_t id = 0;                             // the recorder's
    std::shared_ptr<const ProfiledThread> from;  // the submitting thread, if a profiler watches it
  };
  struct State {
    std::shared_ptr<observe::Recorder> recorder = std::make_shared<observe::Recorder>();
    std::optional<c10::Stream> side_stream;
    std::mutex mutex;
    std::condition_variable wake_worker;
    std::condition_variable wake_waiter;
    std::deque<Task> tasks;
    uint64_t submitted = 0;
    uint64_t run = 0;                                                   // or dropped
    bool keeps_ends = false;                                            // `until_done` was given
    std::deque<std::pair<uint64_t, std::shared_ptr<c10::Event>>> ends;  // of tasks on the device, by number
    std::thread::id thread;
    bool busy = false;
    bool stop = false;
    std::exception_ptr failure;
  };
  static void loop(const std::shared_ptr<State>& state);
  static void run_one(State& state, std::unique_lock<std::mutex>& lock);
  static void observed(State& state, const Task& task);
  using Meanwhile = std::function<void()>;
  using Lock = std::unique_lock<std::mutex>;
  void wait_for_thread(Lock& lock, const Meanwhile& meanwhile, const std::function<bool()>& is_enough);
  void wait_for_device(Lock& lock, const Meanwhile& meanwhile, std::optional<uint64_t> last);

  c10::Device device_;
  CommunicatorPtr until_done_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  pid_t owner_ = getpid();
  std::thread thread_;
};

}  // namespace gossamer
