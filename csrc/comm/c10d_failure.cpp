// What c10d.h does when an operation, or another rank, fails: who waits learns of it, and the error names who is silent.
#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include "backend/backend.h"
#include "comm/c10d.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr auto kRollCallTimeout = std::chrono::milliseconds(3000);
constexpr auto kRollCallPoll = std::chrono::milliseconds(20);
constexpr auto kFailurePoll = std::chrono::milliseconds(1000);

}  // namespace

// A rank that dies breaks its neighbours' operations at once, but those who wait for a neighbour would wait for
// the whole timeout. So whoever fails says so in the store, and whoever waits looks there once a second.
void C10dCommunicator::wait(c10d::Work& work) {
  if (!store_ || !gloo_) {
    work.wait();
    return;
  }
  const auto type = work.retrieveOpType();
  if (type == c10d::OpType::SEND || type == c10d::OpType::RECV) {
    std::call_once(looking_, [this] {
      lookout_ = std::make_unique<Lookout>(
          [store = store_, failed = key("failed")] { return store->check({failed}); });
    });
    return lookout_->wait(work);
  }
  while (true) {
    try {
      work.wait(kFailurePoll);
      return;
    } catch (const std::exception&) {
      if (work.isCompleted()) {
        work.wait();  // it ended meanwhile: well, or with its own error
        return;
      }
    }
    gave_up_ = true;  // also if the store does not answer
    if (store_->check({key("failed")})) throw std::runtime_error("another rank of this group has failed");
    gave_up_ = false;
  }
}

void C10dCommunicator::leave(std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  if (works.empty() || !gloo_) return;
  const std::lock_guard<std::mutex> lock(left_mutex_);
  const auto completed = [](const auto& work) { return work->isCompleted(); };
  left_.erase(std::remove_if(left_.begin(), left_.end(), completed), left_.end());
  left_.insert(left_.end(), works.begin(), works.end());
}

bool C10dCommunicator::leaves_unfinished() const {
  return std::any_of(left_.begin(), left_.end(), [](const auto& work) { return !work->isCompleted(); });
}

std::string C10dCommunicator::key(const std::string& leaf) const { return "gossamer/" + name_ + "/" + leaf; }

void C10dCommunicator::fail(const char* operation, int64_t bytes, const std::exception& error) {
  const std::string reason = first_line(error.what());
  if (shared_memory_) throw PythonError(ErrorKind::comm, reason);  // which names the operation and the ranks
  std::ostringstream message;
  message << operation << " of " << readable_bytes(bytes) << " failed on rank " << rank() << "/" << size()
          << ": " << reason << "; " << roll_call();
  throw PythonError(ErrorKind::comm, message.str());
}

void C10dCommunicator::announce_failure() noexcept {
  try {
    if (shared_memory_) return shared_memory_->abort_because("it gave up after an error of its own");
    if (store_) store_->set(key("failed"), std::vector<uint8_t>{1});
  } catch (const std::exception&) {
    // Whoever hosts the store is gone; the others will notice that.
  }
}

std::string C10dCommunicator::roll_call() {
  if (!store_) return "no store to ask which ranks are silent";
  std::ostringstream silent;
  try {
    announce_failure();
    store_->set(key(std::to_string(rank())), std::vector<uint8_t>{1});
    const auto deadline = std::chrono::steady_clock::now() + kRollCallTimeout;
    std::vector<int> missing;
    do {
      missing.clear();
      for (int peer = 0; peer < size(); ++peer) {
        if (!store_->check({key(std::to_string(peer))})) missing.push_back(peer);
      }
      if (missing.empty()) return "every rank answers the roll call";
      std::this_thread::sleep_for(kRollCallPoll);
    } while (std::chrono::steady_clock::now() < deadline);
    for (size_t i = 0; i < missing.size(); ++i) silent << (i ? ", " : "silent: rank ") << missing[i];
  } catch (const std::exception&) {
    return "the store that rank 0 or the launcher hosts does not answer either";
  }
  return silent.str();
}

}  // namespace gossamer
