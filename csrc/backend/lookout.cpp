// See lookout.h. The thread is detached, because the process that hosts the store of a look may be stopped.
#include "backend/lookout.h"

#include <c10/util/thread_name.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace gossamer {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(200);

std::exception_ptr reason_of(const Look& look) {
  try {
    look();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

struct Lookout::Post {
  struct Wait {
    c10d::Work* work;  // null once the wait has ended
    Look look;
    std::exception_ptr reason;
  };

  void run() {
    c10::setThreadName("gossamer-look");
    std::unique_lock<std::mutex> lock(mutex);
    while (!changed.wait_for(lock, kPoll, [this] { return closed; })) {
      const auto present = waits;
      for (const auto& wait : present) {
        lock.unlock();
        const auto reason = reason_of(wait->look);
        lock.lock();
        if (closed) return;
        if (!reason || wait->work == nullptr) continue;
        wait->reason = reason;
        wait->work->abort();
      }
    }
  }

  const pid_t owner = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Wait>> waits;
  bool closed = false;
};

Lookout::Lookout() : post_(std::make_shared<Post>()) {
  std::thread([post = post_] { post->run(); }).detach();
}

Lookout::~Lookout() {
  if (post_->owner != getpid()) return;  // a forked child has no such thread
  const std::lock_guard<std::mutex> lock(post_->mutex);
  post_->closed = true;
  post_->changed.notify_all();
}

void Lookout::wait(c10d::Work& work, const Look& look, std::chrono::milliseconds limit) {
  Post& post = *post_;
  const auto wait = std::make_shared<Post::Wait>(Post::Wait{&work, look, nullptr});
  {
    const std::lock_guard<std::mutex> lock(post.mutex);
    post.waits.push_back(wait);
  }
  std::exception_ptr error;
  try {
    work.wait(limit);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(post.mutex);
  post.waits.erase(std::find(post.waits.begin(), post.waits.end(), wait));
  wait->work = nullptr;
  if (wait->reason) error = wait->reason;
  if (error) std::rethrow_exception(error);
}

}  // namespace gossamer
