// See queue.h.
#include "backend/queue.h"

#include <utility>

#include "errors.h"

namespace gossamer {

Queue::~Queue() { close(); }

void Queue::submit(Task task, bool now) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) throw PythonError(ErrorKind::comm, "the group was shut down; make a new one");
  tasks_.push_back(std::move(task));
  if (now && tasks_.size() == 1 && !running_) return run_first(lock);
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  changed_.notify_all();
}

void Queue::run_first(std::unique_lock<std::mutex>& lock) {
  Task task = std::move(tasks_.front());
  tasks_.pop_front();
  running_ = true;
  lock.unlock();
  task();
  task = nullptr;  // what it holds is freed before anyone learns that it has run
  lock.lock();
  running_ = false;
  changed_.notify_all();
}

void Queue::help(const std::function<bool()>& done) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!done()) {
    if (!running_ && !tasks_.empty()) {
      run_first(lock);
    } else if (!running_) {
      return;  // nothing of this queue can complete it
    } else {
      changed_.wait(lock);
    }
  }
}

void Queue::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (!running_ && !tasks_.empty()) {
      run_first(lock);
    } else if (closed_ && tasks_.empty()) {
      return;
    } else {
      changed_.wait(lock);
    }
  }
}

void Queue::close() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    while (running_ || !tasks_.empty()) {
      if (running_) {
        changed_.wait(lock);
      } else {
        run_first(lock);
      }
    }
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace gossamer
