// c10d.h's handling of failures: a waiting rank learns of another's failure, and the error names the silent ranks.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <sstream>
#include <thread>

#include "backend/announced.h"
#include "backend/backend.h"
#include "comm/c10d.h"
#include "comm/device_wait.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr auto kRollCallTimeout = std::chrono::milliseconds(3000);
constexpr auto kRollCallPoll = std::chrono::milliseconds(20);
constexpr auto kFailurePoll = std::chrono::milliseconds(200);
constexpr int kProbeTag = 0x676f73;  // no message has this tag

// What a rank has announced, or that the store is gone; empty while all is well.
std::string failure_in(c10d::Store& store, const std::string& key) {
  try {
    return announced(store, key);
  } catch (const std::exception& error) {
    return std::string("the store does not answer: ") + error.what();
  }
}

}  // namespace

// A rank that dies breaks the operations of its neighbours at once; ranks that wait for a neighbour would wait for the
// whole timeout. So a rank that fails writes it into the store, and a waiting rank looks there five times a second.
void C10dCommunicator::wait(c10d::Work& work) {
  const auto type = work.retrieveOpType();
  const bool is_message = type == c10d::OpType::SEND || type == c10d::OpType::RECV;
  // The backend "gossamer" ends its own waits. Between hosts its messages are Gloo's.
  const bool over_hosts = shared_memory_ != nullptr && shared_memory_->hosts().size() > 1;
  if (!(gloo_ && store_) && !(over_hosts && is_message)) {
    work.wait();
    return;
  }
  if (is_message) {
    const auto store = over_hosts ? shared_memory_->failures() : store_;
    const Look look = [store, failed = over_hosts ? gossamer::kFailed : key("failed")] {
      if (const auto what = failure_in(*store, failed); !what.empty()) throw std::runtime_error(what);
    };
    if (call_ != nullptr) return call_->wait(work, look);
    std::call_once(looking_, [this] { lookout_ = std::make_unique<Lookout>(); });
    return lookout_->wait(work, look);
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
    if (const auto what = announced(*store_, key("failed")); !what.empty()) throw std::runtime_error(what);
    gave_up_ = false;
  }
}

void C10dCommunicator::wait_for_device() {
  if (!host_timeout_) return;
  const auto failure = [this] { return store_ ? failure_in(*store_, key("failed")) : std::string(); };
  gossamer::wait_for_device(device_, {*host_timeout_, failed_, failure, [this] { abort_on_device(); }});
}

void C10dCommunicator::abort_on_device() noexcept {
  std::call_once(aborting_, [this] {
    try {
      backend_->abort();
    } catch (const std::exception&) {
      // It was aborted already.
    }
  });
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

std::string C10dCommunicator::listed(const std::vector<int>& ranks) const {
  std::ostringstream text;
  for (size_t i = 0; i < ranks.size(); ++i) text << (i ? ", " : "") << name_of(ranks[i]);
  return text.str();
}

std::string C10dCommunicator::place() const {
  if (ranks_.empty()) return std::to_string(rank()) + "/" + std::to_string(size());
  std::vector<int> all(ranks_.size());
  std::iota(all.begin(), all.end(), 0);
  return std::to_string(name_of(rank())) + " of ranks " + listed(all);
}

std::string C10dCommunicator::key(const std::string& leaf) const { return "gossamer/" + name_ + "/" + leaf; }

void C10dCommunicator::fail(const char* operation, int64_t bytes, const std::exception& error) {
  const std::string reason = first_line(error.what());
  const bool is_known = shared_memory_ != nullptr || dynamic_cast<const KnownFailure*>(&error) != nullptr;
  if (is_known) raise_python(ErrorKind::comm, reason);  // it names operation and ranks
  raise_python(ErrorKind::comm, operation, " of ", readable_bytes(bytes), " failed on rank ", place(), ": ",
               reason, who_is_to_blame(reason));
}

std::string C10dCommunicator::who_is_to_blame(const std::string& reason) {
  std::string what;
  try {
    if (store_) {
      store_->set(key(std::to_string(rank())), std::vector<uint8_t>{1});  // for the roll call of another
      what = announced(*store_, key("failed"));
    }
  } catch (const std::exception&) {
    // The process that hosts the store is gone; broken connections show it.
  }
  // When an operation times out, Gloo closes this rank's connections, and the other ranks report those as lost.
  if (reason.find("imed out") == std::string::npos && reason.find("timeout") == std::string::npos) {
    if (!what.empty()) return reason == what ? "" : "; " + what;
    if (const auto lost = listed(disconnected()); !lost.empty()) {
      announce_failure("lost its connection to rank " + lost);
      return "; it has lost its connection to rank " + lost;
    }
  }
  announce_failure("failed: " + reason);
  return "; " + roll_call();
}

void C10dCommunicator::tell(const std::string& text) noexcept {
  failed_ = true;
  try {
    if (shared_memory_) return shared_memory_->announce(text);
    if (store_) announce(*store_, key("failed"), text);
  } catch (const std::exception&) {
    // The process that hosts the store is gone; the other ranks will notice that.
  }
  if (nccl_ && getpid() == owner_) abort_on_device();
}

std::string C10dCommunicator::trouble() noexcept {
  try {
    if (shared_memory_) return shared_memory_->trouble();
    return store_ ? announced(*store_, key("failed")) : std::string();
  } catch (const std::exception&) {
    return {};
  }
}

// Gloo refuses a receive at once where the connection is broken. Where it is not, nothing arrives: no message has this tag.
std::vector<int> C10dCommunicator::disconnected() {
  std::vector<int> broken;
  for (int peer = 0; gloo_ && peer < size(); ++peer) {
    if (peer == rank()) continue;
    try {
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      backend_->recv(nothing, peer, kProbeTag);
    } catch (const std::exception& error) {
      // Gloo closes all connections itself when an operation has timed out.
      if (std::string(error.what()).find("timeout") == std::string::npos) broken.push_back(peer);
    }
  }
  return broken;
}

std::string C10dCommunicator::roll_call() {
  if (!store_) return "no store to ask which ranks are silent";
  std::vector<int> missing;
  try {
    const auto deadline = std::chrono::steady_clock::now() + kRollCallTimeout;
    do {
      missing.clear();
      for (int peer = 0; peer < size(); ++peer) {
        if (!store_->check({key(std::to_string(peer))})) missing.push_back(peer);
      }
      if (missing.empty()) return "every rank answers the roll call";
      std::this_thread::sleep_for(kRollCallPoll);
    } while (std::chrono::steady_clock::now() < deadline);
  } catch (const std::exception&) {
    return "the store that rank 0 or the launcher hosts does not answer either";
  }
  return "silent: rank " + listed(missing);
}

}  // namespace gossamer
