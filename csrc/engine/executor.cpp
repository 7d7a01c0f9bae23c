// See executor.h. Device-generic: c10's guard interface stands for CUDA, so no CUDA header is needed.
#include "engine/executor.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/thread_name.h>

#include <chrono>
#include <memory>
#include <utility>

#include "backend/gil.h"
#include "comm/device_wait.h"
#include "engine/profiled.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr auto kMeanwhile = std::chrono::milliseconds(100);
constexpr auto kNoLimit = std::chrono::hours(24 * 365);
// A rank that has left may have done its part of what is in flight.
constexpr auto kGrace = std::chrono::seconds(3);

}  // namespace

Executor::Executor(c10::Device device, CommunicatorPtr until_done)
    : device_(device), until_done_(device.is_cpu() ? nullptr : std::move(until_done)) {
  state_->keeps_ends = until_done_ != nullptr;
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    state_->side_stream = guard.getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
  }
  thread_ = std::thread([state = state_] { loop(state); });
}

void Executor::stop() {
  if (!thread_.joinable()) return;
  if (getpid() != owner_) return thread_.detach();
  std::deque<Task> dropped;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
    dropped.swap(state_->tasks);
  }
  state_->wake_worker.notify_one();
  dropped.clear();
  recorder().leave_all();
  if (std::this_thread::get_id() == thread_.get_id()) return thread_.detach();
  // A Python task may need the GIL that this thread holds.
  const WithoutGil without_gil;
  thread_.join();
}

void Executor::finish() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake_worker.notify_one();
  thread_.detach();
}

bool Executor::running() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->busy || !state_->tasks.empty();
}

bool Executor::busy() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  auto& ends = state_->ends;
  try {
    while (!ends.empty() && ends.front().second->query()) ends.pop_front();
  } catch (const std::exception&) {
    ends.clear();  // the device has failed, and says so to whoever waits for it
  }
  return state_->busy || !state_->tasks.empty() || !ends.empty();
}

uint64_t Executor::submit(std::function<void()> run, std::string what, int64_t bucket) {
  const uint64_t id = recorder().enter("queued: " + what, bucket);
  Task task{std::move(run), std::move(what), bucket, id, profiled_thread()};
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    number = ++state_->submitted;
  }
  state_->wake_worker.notify_one();
  return number;
}

uint64_t Executor::submit_behind_current(std::function<void()> task, std::string what) {
  if (!side_stream()) return submit(std::move(task), std::move(what));
  auto ready = std::make_shared<c10::Event>(device_.type());
  ready->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  const auto behind = [side = *side_stream(), ready, task = std::move(task)] {
    ready->block(side);
    task();
  };
  return submit(behind, std::move(what));
}

void Executor::wait(const std::function<void()>& meanwhile, std::optional<uint64_t> last) {
  State& state = *state_;
  const observe::Waiting waiting(recorder(), "wait", profiled_thread() != nullptr);
  std::unique_lock<std::mutex> lock(state.mutex);
  wait_for_thread(lock, meanwhile, [&] { return last && state.run >= *last && !state.failure; });
  if (until_done_) {
    wait_for_device(lock, meanwhile, last);
  } else if (state.side_stream) {
    c10::Event done(device_.type());
    done.record(*state.side_stream);
    done.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  if (state.failure) std::rethrow_exception(std::exchange(state.failure, nullptr));
}

void Executor::wait_until_run(const std::function<void()>& meanwhile, uint64_t last) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (std::this_thread::get_id() == state_->thread) return;
  wait_for_thread(lock, meanwhile, [&] { return state_->run >= last; });
}

// Until the thread has nothing to do, or is_enough().
void Executor::wait_for_thread(Lock& lock, const Meanwhile& meanwhile,
                               const std::function<bool()>& is_enough) {
  State& state = *state_;
  const auto has_run = [&] { return (state.tasks.empty() && !state.busy) || is_enough(); };
  while (!state.wake_waiter.wait_for(lock, kMeanwhile, has_run)) {
    lock.unlock();
    meanwhile();
    lock.lock();
  }
}

// After a task that failed nobody knows whether the device will ever do what others have queued.
void Executor::wait_for_device(Lock& lock, const Meanwhile& meanwhile, std::optional<uint64_t> last) {
  std::shared_ptr<c10::Event> end;
  for (const auto& [number, event] : state_->ends) {
    if (!last || number <= *last) end = event;
  }
  if (!end || state_->failure) return;
  lock.unlock();
  static const std::atomic<bool> kNever{false};
  std::optional<std::chrono::steady_clock::time_point> since;
  const auto failure = [&] {
    meanwhile();
    const std::string trouble = until_done_->trouble();
    if (trouble.empty()) return trouble;
    const auto now = std::chrono::steady_clock::now();
    if (!since) since = now;
    return now - *since > kGrace ? trouble : std::string();
  };
  try {
    wait_for_event(*end, {kNoLimit, kNever, failure, [&] { until_done_->abort(); }});
  } catch (const std::runtime_error& error) {
    if (has_python_class(error)) throw;
    raise_python(ErrorKind::comm, error.what());
  }
  lock.lock();
  auto& ends = state_->ends;
  while (!ends.empty() && (!last || ends.front().first <= *last)) ends.pop_front();
}

void Executor::loop(const std::shared_ptr<State>& state) {
  c10::setThreadName("gossamer");
  std::unique_lock<std::mutex> lock(state->mutex);
  state->thread = std::this_thread::get_id();
  while (true) {
    state->wake_worker.wait(lock, [&] { return state->stop || !state->tasks.empty(); });
    if (state->tasks.empty()) return;
    run_one(*state, lock);
  }
}

void Executor::observed(State& state, const Task& task) {
  std::optional<ProfiledGuard> profiled;
  if (task.from) profiled.emplace(*task.from);
  const observe::Scope scope(*state.recorder, state.recorder->number(), task.from != nullptr);
  observe::context().bucket = task.bucket;
  state.recorder->change(task.id, task.what);
  const observe::Span span(task.what.c_str(), "task");
  task.run();
}

void Executor::run_one(State& state, std::unique_lock<std::mutex>& lock) {
  Task task = std::move(state.tasks.front());
  state.tasks.pop_front();
  const bool dropped = state.failure != nullptr;
  state.busy = true;
  lock.unlock();
  std::exception_ptr failure;
  std::shared_ptr<c10::Event> end;  // on the device
  if (!dropped) {
    try {
      c10::OptionalStreamGuard guard;
      if (state.side_stream) guard.reset_stream(*state.side_stream);
      observed(state, task);
      if (state.keeps_ends) {
        end = std::make_shared<c10::Event>(state.side_stream->device_type());
        end->record(*state.side_stream);
      }
    } catch (...) {
      failure = std::current_exception();
    }
  }
  state.recorder->leave(task.id);
  {
    // Nobody joins this thread if the task holds the last reference to its executor.
    const WhilePythonLives python;
    if (!python) leak(task);
    task = {};  // its captures are freed before a waiter goes on
  }
  lock.lock();
  state.busy = false;
  ++state.run;
  if (end) state.ends.emplace_back(state.run, std::move(end));
  if (failure) state.failure = std::move(failure);
  state.wake_waiter.notify_all();
}

}  // namespace gossamer
