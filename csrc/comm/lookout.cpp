// See lookout.h. The thread is detached, as the store that it asks may be that of a stopped process.
#include "comm/lookout.h"

#include <c10/util/thread_name.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace gossamer {
namespace {

constexpr auto kPoll = std::chrono::seconds(1);

}  // namespace

struct Lookout::Post {
  void run() {
    c10::setThreadName("gossamer-look");
    std::unique_lock<std::mutex> lock(mutex);
    while (!changed.wait_for(lock, kPoll, [this] { return closed; })) {
      if (waited_for.empty()) continue;
      lock.unlock();
      const bool seen = ask();
      lock.lock();
      if (closed || !seen) continue;
      failed = true;
      for (c10d::Work* work : waited_for) work->abort();
    }
  }

  bool ask() const {
    try {
      return has_failed();
    } catch (const std::exception&) {
      return true;
    }
  }

  std::function<bool()> has_failed;
  const pid_t owner = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<c10d::Work*> waited_for;  // not freed before their waiter has had the mutex
  bool failed = false;
  bool closed = false;
};

Lookout::Lookout(std::function<bool()> failed) : post_(std::make_shared<Post>()) {
  post_->has_failed = std::move(failed);
  std::thread([post = post_] { post->run(); }).detach();
}

Lookout::~Lookout() {
  if (post_->owner != getpid()) return;  // a forked child has no such thread
  const std::lock_guard<std::mutex> lock(post_->mutex);
  post_->closed = true;
  post_->changed.notify_all();
}

void Lookout::wait(c10d::Work& work) {
  Post& post = *post_;
  {
    const std::lock_guard<std::mutex> lock(post.mutex);
    if (post.failed) throw std::runtime_error("another rank of this group has failed");
    post.waited_for.push_back(&work);
  }
  std::exception_ptr error;
  try {
    work.wait();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(post.mutex);
  post.waited_for.erase(std::find(post.waited_for.begin(), post.waited_for.end(), &work));
  if (post.failed) throw std::runtime_error("another rank of this group has failed");
  if (error) std::rethrow_exception(error);
}

}  // namespace gossamer
