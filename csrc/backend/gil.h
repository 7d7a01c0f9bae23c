// What native threads must know of Python: releasing the GIL, and not outliving the interpreter. Used by the backend and
// above. This header knows no Python; python/gil.cpp does the work.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace gossamer {

// Releases the GIL, if this thread holds it. For code that may wait for a thread that wants the GIL.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* saved_;  // Python's state of this thread; null if the thread did not hold the GIL
};

// For Executor::wait: lets Ctrl-C end a wait for other ranks. Python's handlers run in its main thread only. A backward on
// the CPU ends there; on an accelerator it ends in autograd's thread, and the interrupt waits for the group.
void raise_interrupt();

// For a thread that nobody joins, around code that may need Python: freeing a tensor that Python knows, calling back.
// Once the interpreter ends, Python ends each thread that asks for the GIL, and a C++ function on such a thread's stack
// aborts the process. So end() is called at exit, before that. After end() the object is false, and what would need
// Python must be leaked.
class WhilePythonLives {
 public:
  WhilePythonLives() {
    inside_.fetch_add(1);
    alive_ = !ending_.load();
    if (!alive_) inside_.fetch_sub(1);
  }
  ~WhilePythonLives() {
    if (alive_) inside_.fetch_sub(1);
  }
  WhilePythonLives(const WhilePythonLives&) = delete;
  WhilePythonLives& operator=(const WhilePythonLives&) = delete;
  explicit operator bool() const { return alive_; }

  // To be called without the GIL. Waits for the threads inside, but not for ever: a callback may wait for other ranks.
  static void end() {
    constexpr auto limit = std::chrono::seconds(2);
    ending_ = true;
    const auto until = std::chrono::steady_clock::now() + limit;
    while (inside_.load() > 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  inline static std::atomic<int> inside_{0};
  inline static std::atomic<bool> ending_{false};
  bool alive_;
};

template <class T>
void leak(T& value) {
  new T(std::exchange(value, T()));
}

}  // namespace gossamer
