// The backend's constructor, destructor and shutdown, and what its operations share. The operations are in reductions.cpp,
// moves.cpp and p2p.cpp of this folder. See backend.h.
#include "backend/backend.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <pthread.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "backend/gil.h"
#include "backend/gloo.h"
#include "backend/start.h"
#include "errors.h"

namespace gossamer {
namespace {

// c10d's store as the store in which the ranks of a shm::Group meet.
class MeetingStore : public shm::Store {
 public:
  explicit MeetingStore(c10d::Store& store) : store_(store) {}

  void set(const std::string& key, const std::string& value) override {
    store_.set("gossamer/" + key, std::vector<uint8_t>(value.begin(), value.end()));
  }

  std::string get(const std::string& key, shm::Deadline deadline) override {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - shm::Clock::now());
    try {
      store_.wait({"gossamer/" + key}, std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      raise(ErrorKind::comm, first_line(error.what()));
    }
    const auto value = store_.get("gossamer/" + key);
    return {value.begin(), value.end()};
  }

  void remove(const std::string& key) noexcept override {
    try {
      store_.deleteKey("gossamer/" + key);
    } catch (const std::exception&) {
      // A stale key matters only to a group that meets in this store under the same name.
    }
  }

 private:
  c10d::Store& store_;
};

// getpid() is a system call, which every operation would pay for.
pid_t current_process() {
  static std::atomic<pid_t> current{getpid()};
  static const int failed = pthread_atfork(nullptr, nullptr, [] { current = getpid(); });
  return failed ? getpid() : current.load(std::memory_order_relaxed);
}

}  // namespace

std::exception_ptr python_error(const char* title, std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const RaisedError&) {
    return error;
  } catch (const Error& known) {
    return make_python_error(known.kind, known.what());
  } catch (const std::exception& other) {
    return make_python_error(ErrorKind::comm, std::string(title) + ": " + first_line(other.what()));
  }
}

GossamerBackend::GossamerBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 std::chrono::milliseconds timeout, const std::string& settings)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(c10::make_intrusive<Options>("gossamer", timeout)),
      owner_(current_process()) {
  living_->backend = this;
  check_argument(rank >= 0 && rank < size, "gossamer backend: rank must be in [0, size), got rank ", rank,
                 " of ", size);
  MeetingStore meeting_store(*store_);
  const auto deadline = deadline_of(timeout);
  auto meeting = shm::meet(meeting_store, rank, size, deadline);
  own_store_ = c10::make_intrusive<c10d::PrefixStore>(meeting.name, store_);
  group_ = std::make_unique<shm::Group>(std::move(meeting));
  if (hosts().size() > 1) {
    hosts_ = std::make_unique<Hosts>(*group_, gloo(), own_store_, rank, size);
  }
  // Nobody returns before all ranks have come: a rank that is lost in the meeting is an error on all of them.
  agree(shm::Call(), deadline);
  shm::forget(meeting_store, rank);
  // It also waits for all: the next meeting in this store must not begin while keys of this one are there.
  compare_settings(settings, deadline);
}

void GossamerBackend::compare_settings(const std::string& settings, shm::Deadline deadline) {
  constexpr size_t kText = 512;
  struct Settings {
    uint64_t hash;
    char text[kText];
  };
  std::vector<Settings> all(static_cast<size_t>(getSize()));
  Settings own{std::hash<std::string>()(settings), {}};
  settings.copy(own.text, kText - 1);
  std::vector<void*> places;
  for (auto& place : all) places.push_back(&place);
  gather_bytes(&own, places, sizeof(own), deadline);
  for (size_t other = 1; other < all.size(); ++other) {
    if (all[other].hash == all[0].hash) continue;
    const auto named = [](const Settings& some) { return some.text[0] ? some.text : "no options"; };
    raise_python(ErrorKind::config, "gossamer backend: all ranks must give a group the same options, got ",
                 named(all[0]), " on rank 0 and ", named(all[other]), " on rank ", other);
  }
}

bool GossamerBackend::close() {
  if (owner_ != getpid()) return false;
  const WithoutGil without_gil;  // the queue may wait for the GIL, to free a tensor's Python object
  queue_->close();
  return true;
}

GossamerBackend::~GossamerBackend() {
  // A forked child has none of the threads, and must not say that the rank has left.
  if (owner_ != getpid()) {
    new std::shared_ptr<Queue>(std::move(queue_));
    mailbox_.release();
    elsewhere_.leak();
    hosts_.release();
    gloo_.release();
    group_.release();
    return;
  }
  // A thread that is joined here may wait for the GIL, to free a tensor's Python object.
  const WithoutGil without_gil;
  {
    const std::lock_guard<std::mutex> lock(living_->mutex);
    living_->backend = nullptr;
  }
  queue_->close();
  mailbox_.reset();
  elsewhere_.drop();
  hosts_.reset();
  gloo_.reset();
  group_.reset();
}

c10::intrusive_ptr<c10d::Backend> GossamerBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<Options>& options) {
  const auto found = std::find(ranks.begin(), ranks.end(), getRank());
  if (found == ranks.end()) return nullptr;
  std::string name = "split";
  for (const int rank : ranks) name += "/" + std::to_string(rank);
  auto part = make_part(c10::make_intrusive<c10d::PrefixStore>(name, store),
                        static_cast<int>(found - ranks.begin()), static_cast<int>(ranks.size()), options);
  if (const auto type = elsewhere_.type()) part->connect_elsewhere(*type, connect_device_);
  return part;
}

c10::intrusive_ptr<GossamerBackend> GossamerBackend::make_part(const c10::intrusive_ptr<c10d::Store>& store,
                                                               int rank, int size,
                                                               const c10::intrusive_ptr<Options>& options) {
  return c10::make_intrusive<GossamerBackend>(store, rank, size,
                                              options ? options->timeout : options_->timeout);
}

void GossamerBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (const auto other = elsewhere_.made()) other->setTimeout(timeout);
  const std::lock_guard<std::mutex> lock(gloo_mutex_);
  if (gloo_) gloo_->setTimeout(timeout);
}

c10d::ErrorType GossamerBackend::getError() {
  return trouble().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

std::string GossamerBackend::trouble() const {
  for (int peer = 0; peer < group_->size(); ++peer) {
    if (auto reason = group_->trouble(peer); !reason.empty()) return reason;
  }
  return {};
}

void GossamerBackend::abort() {
  if (const auto other = owner_ == getpid() ? elsewhere_.made() : nullptr) other->abort();
  announce("rank " + std::to_string(name_of(getRank())) + " has failed: its group was aborted");
}

void GossamerBackend::announce(const std::string& text) {
  if (owner_ != getpid()) return;  // a forked child ends nothing of its parent's
  hosts_ ? hosts_->announce(text) : group_->abort(text);
}

void GossamerBackend::name_ranks(std::vector<int> names) {
  group_->name_ranks(names);
  names_ = std::move(names);
}

void GossamerBackend::shutdown() {
  if (owner_ != getpid()) return;
  const WithoutGil without_gil;
  const bool failed = group_->has_failed();
  queue_->close();
  std::unique_ptr<shm::Mailbox> mailbox;  // destroyed without the lock, which its waiters may want
  {
    const std::lock_guard<std::mutex> lock(mailbox_mutex_);
    shut_down_ = true;
    mailbox = std::move(mailbox_);
  }
  mailbox.reset();
  elsewhere_.shut_down(failed);
  group_->leave();
}

void GossamerBackend::require_usable() const {
  if (owner_ == current_process()) return;
  raise_python(ErrorKind::comm, "gossamer backend: rank ", getRank(), "'s group was made in process ", owner_,
               " and cannot be used in its forked child ", getpid(), "; make the group after the fork");
}

shm::Deadline GossamerBackend::deadline_of(std::chrono::milliseconds timeout) const {
  return shm::Clock::now() + (timeout == c10d::kUnsetTimeout ? options_->timeout : timeout);
}

GossamerBackend::Reply GossamerBackend::enqueue(const Plan& plan, const Tensors& inputs, Lists outputs,
                                                Body body) {
  // Threads may still wait for a work, or abort it, after the backend is gone.
  const auto help = [queue = queue_](GossamerWork& work) {
    queue->help([&work] { return work.isCompleted(); });
  };
  auto work = c10::make_intrusive<GossamerWork>(getRank(), plan.type, plan.title, inputs, std::move(outputs),
                                                ++sequence_, help);
  work->on_abort(aborter());
  const auto timeout = plan.timeout == c10d::kUnsetTimeout ? options_->timeout : plan.timeout;
  queue_->submit(
      [work, body = std::move(body), title = plan.title, timeout]() mutable {
        std::exception_ptr error;
        try {
          body(shm::Clock::now() + timeout);
        } catch (...) {
          error = python_error(title, std::current_exception());
        }
        body = nullptr;  // frees the tensors before a waiter sees that the work is complete
        return work->complete(error);
      },
      !plan.async);
  return begun(std::move(work));
}

GossamerBackend::Reply GossamerBackend::begun(Reply work) {
  if (coalescing_) coalescing_->works.push_back(work);
  return work;
}

GossamerBackend::Reply GossamerBackend::failed(const Plan& plan, const Tensors& inputs, Lists outputs,
                                               std::exception_ptr error) {
  auto work = c10::make_intrusive<GossamerWork>(getRank(), plan.type, plan.title, inputs, std::move(outputs),
                                                sequence_.load(), nullptr);
  work->complete(std::move(error));
  return work;
}

std::function<void()> GossamerBackend::aborter() {
  return [living = living_] {
    const std::lock_guard<std::mutex> lock(living->mutex);
    if (living->backend != nullptr) living->backend->abort();
  };
}

at::Tensor GossamerBackend::allocate(int64_t bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (hosts_ || bytes == 0) return at::zeros({bytes}, options);
  auto block = std::make_shared<shm::Block>(bytes);
  auto shared = share(block);
  return at::from_blob(block->mapping.data(), {bytes}, [shared](void*) {}, options);
}

std::shared_ptr<shm::Shared> GossamerBackend::share(const std::shared_ptr<shm::Block>& block) {
  check_argument(!hosts_, "symmetric memory: all ranks must be on one host, got ", hosts().size(), " hosts");
  const WithoutGil without_gil;  // torch's rendezvous() calls with the GIL held
  std::shared_ptr<shm::Shared> shared;
  const Plan plan{c10d::OpType::UNKNOWN, "gossamer:symmetric_memory", c10d::kUnsetTimeout, false};
  const auto work = start(plan, {}, {}, [&](shm::Deadline deadline) {
    shared = std::make_shared<shm::Shared>(*group_, block, windows_.next_id(), deadline);
    windows_.add(shared);
  });
  if (work) work->wait();  // a work exists only after a failure
  return shared;
}

c10::intrusive_ptr<c10d::Backend> GossamerBackend::gloo() {
  const std::lock_guard<std::mutex> lock(gloo_mutex_);
  if (gloo_) return gloo_;
  const auto store = c10::make_intrusive<c10d::PrefixStore>("gloo", own_store_);
  try {
    gloo_ = make_gloo(store, getRank(), getSize(), options_->timeout);
  } catch (const std::exception& error) {
    // There may be no other hosts at all: a rank that ended before the others met it looks like a rank of another host.
    std::ostringstream text;
    text << "rank " << getRank() << "/" << getSize() << ": no connection through Gloo with rank";
    const char* separator = " ";
    for (const auto& host : hosts()) {
      const bool own = std::find(host.begin(), host.end(), getRank()) != host.end();
      for (const int rank : host) {
        if (!own || hosts().size() == 1) text << std::exchange(separator, ", ") << rank;
      }
    }
    raise_python(ErrorKind::comm, text.str() + ": " + first_line(error.what()));
  }
  return gloo_;
}

c10::intrusive_ptr<GossamerBackend> find_backend(const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  auto* backend = dynamic_cast<GossamerBackend*>(group->getBackend(c10::DeviceType::CPU).get());
  check_argument(backend != nullptr, "symmetric memory: the group '", group_name,
                 "' must use the backend 'gossamer' for CPU tensors, got '",
                 group->getBackend(c10::DeviceType::CPU)->getBackendName(), "'");
  return c10::intrusive_ptr<GossamerBackend>::reclaim_copy(backend);
}

}  // namespace gossamer
