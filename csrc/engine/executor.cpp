// See executor.h. Device-generic: c10's guard interface stands for CUDA, so no CUDA header is needed.
#include "engine/executor.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/thread_name.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>
#include <utility>

namespace gossamer {
namespace {

constexpr auto kMeanwhile = std::chrono::milliseconds(100);

}  // namespace

Executor::Executor(c10::Device device) : device_(device) {
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    side_stream_ = guard.getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
  }
  thread_ = std::thread([this] { loop(); });
}

void Executor::stop() {
  if (!thread_.joinable()) return;
  if (getpid() != owner_) return thread_.detach();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    tasks_.clear();
  }
  wake_worker_.notify_one();
  // A Python task may need the GIL that this thread holds.
  std::optional<pybind11::gil_scoped_release> release;
  if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
  thread_.join();
}

bool Executor::busy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return busy_ || !tasks_.empty();
}

void Executor::submit(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_worker_.notify_one();
}

void Executor::submit_behind_current(std::function<void()> task) {
  if (!side_stream_) return submit(std::move(task));
  auto ready = std::make_shared<c10::Event>(device_.type());
  ready->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  submit([this, ready, task = std::move(task)] {
    ready->block(*side_stream_);
    task();
  });
}

void Executor::wait(const std::function<void()>& meanwhile) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!wake_waiter_.wait_for(lock, kMeanwhile, [this] { return tasks_.empty() && !busy_; })) {
    lock.unlock();
    meanwhile();
    lock.lock();
  }
  if (side_stream_) {
    c10::Event done(device_.type());
    done.record(*side_stream_);
    done.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Executor::loop() {
  c10::setThreadName("gossamer");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_worker_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    run_one(lock);
  }
}

void Executor::run_one(std::unique_lock<std::mutex>& lock) {
  auto task = std::move(tasks_.front());
  tasks_.pop_front();
  if (!failure_) {
    busy_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      c10::OptionalStreamGuard guard;
      if (side_stream_) guard.reset_stream(*side_stream_);
      task();
    } catch (...) {
      failure = std::current_exception();
    }
    task = nullptr;  // what it owns is freed before a waiter goes on
    lock.lock();
    busy_ = false;
    if (failure) failure_ = std::move(failure);
  }
  if (tasks_.empty()) wake_waiter_.notify_all();
}

}  // namespace gossamer
