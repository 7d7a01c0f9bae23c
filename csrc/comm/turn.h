// One thread at a time uses a communicator: ranks must begin its operations in one order, which two threads cannot keep. An
// operation of another thread that would begin before the first one's has been waited for is refused.
#pragma once

#include <mutex>
#include <thread>
#include <utility>

namespace gossamer {

class Turns {
 public:
  // The time from the beginning of an operation until it has ended. Destroying it ends it too.
  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(&turns) {}
    Turn(Turn&& other) noexcept : turns_(std::exchange(other.turns_, nullptr)) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() { end(); }
    void end() noexcept;

   private:
    Turns* turns_;
  };

  // Throws PythonError(config), with both operations, while another thread has a turn.
  Turn begin(const char* operation);

 private:
  std::mutex mutex_;
  int running_ = 0;
  std::thread::id thread_;  // of the turns that run
  char name_[16] = {};      // of that thread
  const char* operation_ = nullptr;
};

}  // namespace gossamer
