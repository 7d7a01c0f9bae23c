// Sleeping and waking on a word of shared memory. Not a lock: barrier and mailbox build on it. A sleep may end without a
// reason, so callers look at the word again.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace gossamer::shm {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

constexpr auto kSpin = std::chrono::microseconds(50);   // how long a waiting thread looks before it sleeps
constexpr auto kLook = std::chrono::milliseconds(100);  // how often a sleeper looks after its peers

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free,
              "a futex word is a plain 32-bit integer");

// Sleeps while `word` holds `expected`, for `at_most` if nobody wakes it.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds at_most) {
  if (at_most.count() <= 0) return;
  const timespec limit{static_cast<time_t>(at_most.count() / 1000000000),
                       static_cast<long>(at_most.count() % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &limit, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A short pause inside a spin loop.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace gossamer::shm
