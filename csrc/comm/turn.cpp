// See turn.h.
#include "comm/turn.h"

#include <pthread.h>

#include <cstring>

#include "errors.h"

namespace gossamer {

Turns::Turn Turns::begin(const char* operation) {
  char name[sizeof(name_)] = {};
  pthread_getname_np(pthread_self(), name, sizeof(name));
  const std::lock_guard<std::mutex> lock(mutex_);
  check_argument(running_ == 0 || thread_ == std::this_thread::get_id(), operation, " of the thread '", name,
                 "' was to begin before ", operation_ ? operation_ : "", " of the thread '", name_,
                 "' had ended; one thread at a time can use a communicator: wait for the other thread's "
                 "operation, or use "
                 "another group");
  ++running_;
  thread_ = std::this_thread::get_id();
  std::memcpy(name_, name, sizeof(name));
  operation_ = operation;
  return Turn(*this);
}

void Turns::Turn::end() noexcept {
  if (turns_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(turns_->mutex_);
  --turns_->running_;
  turns_ = nullptr;
}

}  // namespace gossamer
