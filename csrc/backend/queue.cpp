// See queue.h. The queue's threads are detached and keep the queue alive, so its owner may be destroyed in an epilogue.
#include "backend/queue.h"

#include <pthread.h>

#include <optional>
#include <thread>
#include <utility>

#include "backend/gil.h"
#include "errors.h"

namespace gossamer {

void Queue::submit(Task task, bool now) {
  Lock lock(mutex_);
  if (closed_) raise_python(ErrorKind::comm, "the group was shut down; make a new one");
  tasks_.push_back(std::move(task));
  if (now && tasks_.size() == 1 && !running_) return run_first(lock);
  require_looper();
  changed_.notify_all();
}

bool Queue::enter() {
  const Lock lock(mutex_);
  if (closed_ || running_ || !tasks_.empty()) return false;
  running_ = true;
  return true;
}

void Queue::leave() {
  const Lock lock(mutex_);
  running_ = false;
  changed_.notify_all();
}

// Starts a thread if there are tasks and no thread takes them, as while the queue's thread runs an epilogue.
void Queue::require_looper() {
  if (loopers_ > 0 || tasks_.empty()) return;
  std::thread([self = shared_from_this()] { self->loop(); }).detach();
  ++loopers_;
}

void Queue::run_first(Lock& lock, bool looping) {
  Task task = std::move(tasks_.front());
  tasks_.pop_front();
  running_ = true;
  lock.unlock();
  Epilogue epilogue = task();
  std::optional<WhilePythonLives> python;
  if (looping && !python.emplace()) {
    leak(task);
    leak(epilogue);
  }
  task = nullptr;  // its captures are freed before a waiter sees that it has run
  lock.lock();
  running_ = false;
  changed_.notify_all();
  if (!epilogue) return;
  loopers_ -= looping;
  require_looper();
  lock.unlock();
  epilogue();
  epilogue = nullptr;
  lock.lock();
  loopers_ += looping;
}

void Queue::help(const std::function<bool()>& done) {
  Lock lock(mutex_);
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
  pthread_setname_np(pthread_self(), "gossamer-queue");
  Lock lock(mutex_);
  while (true) {
    if (!running_ && !tasks_.empty()) {
      run_first(lock, true);
    } else if (closed_ && tasks_.empty()) {
      --loopers_;
      return;
    } else {
      changed_.wait(lock);
    }
  }
}

void Queue::close() {
  Lock lock(mutex_);
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

}  // namespace gossamer
