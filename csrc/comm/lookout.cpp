// See lookout.h. The thread is detached, because the process that hosts its store may be stopped.
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

constexpr auto kPoll = std::chrono::milliseconds(200);

}  // namespace

struct Lookout::Post {
  void run() {
    c10::setThreadName("gossamer-look");
    std::unique_lock<std::mutex> lock(mutex);
    while (!changed.wait_for(lock, kPoll, [this] { return closed; })) {
      if (waited_for.empty()) continue;
      lock.unlock();
      std::string seen = ask();
      lock.lock();
      if (closed || seen.empty()) continue;
      failed = std::move(seen);
      for (c10d::Work* work : waited_for) work->abort();
    }
  }

  std::string ask() const {
    try {
      return what_failed();
    } catch (const std::exception& error) {
      return std::string("the store does not answer: ") + error.what();
    }
  }

  std::function<std::string()> what_failed;
  const pid_t owner = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<c10d::Work*> waited_for;  // alive until their waiter has had the mutex
  std::string failed;
  bool closed = false;
};

Lookout::Lookout(std::function<std::string()> failed) : post_(std::make_shared<Post>()) {
  post_->what_failed = std::move(failed);
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
    if (!post.failed.empty()) throw std::runtime_error(post.failed);
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
  if (!post.failed.empty()) throw std::runtime_error(post.failed);
  if (error) std::rethrow_exception(error);
}

}  // namespace gossamer
