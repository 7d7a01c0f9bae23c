// What native threads have to do with Python: they let go of its lock, and do not outlive it. Used by the backend and above.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

namespace gossamer {

// Lets go of Python's lock, where this thread holds it, for what may wait for a thread that wants it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

// For a thread that nobody joins, around what may need Python: freeing a tensor that Python knows, calling back. Python
// ends a thread that wants its lock once the interpreter ends, and no C++ function on its stack outlives that: the process
// aborts. So end() comes first, at exit. From then on this is false, and what would need Python must be leaked.
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

  // Without the GIL. Waits for those inside; not for ever, as a callback may wait for other ranks.
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
