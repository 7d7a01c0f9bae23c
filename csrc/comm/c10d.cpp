// Calls into c10d::Backend; see c10d.h. Byte counts are what this rank's own algorithm-independent share is:
// every byte that leaves this rank for another, as the backend's operation is defined (a ring for all-reduce).
#include "comm/c10d.h"

#include <ATen/ops/zeros.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr auto kRollCallTimeout = std::chrono::milliseconds(3000);
constexpr auto kRollCallPoll = std::chrono::milliseconds(20);
constexpr auto kFailurePoll = std::chrono::milliseconds(1000);

class C10dPending : public Pending {
 public:
  C10dPending(std::vector<c10::intrusive_ptr<c10d::Work>> works, const char* operation, int64_t bytes,
              C10dCommunicator* owner)
      : works_(std::move(works)), operation_(operation), bytes_(bytes), owner_(owner) {}

  void wait() override {
    for (auto& work : works_) {
      try {
        owner_->wait(*work);
      } catch (const std::exception& error) {
        owner_->fail(operation_, bytes_, error);
      }
    }
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  const char* operation_;
  int64_t bytes_;
  C10dCommunicator* owner_;
};

c10d::ReduceOp to_c10d(ReduceOp op) {
  return op == ReduceOp::sum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
}

// The same memory without a Python object. A backend's thread may drop the last reference to a tensor when the
// interpreter is already ending, and must not need the GIL for it.
std::vector<at::Tensor> detached(const at::Tensor& x) { return {x.detach()}; }

}  // namespace

at::Tensor Communicator::allocate(int64_t bytes) {
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device()));
}

C10dCommunicator::C10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
                                   c10::intrusive_ptr<c10d::Store> store, std::string name)
    : backend_(std::move(backend)),
      device_(device),
      store_(std::move(store)),
      name_(std::move(name)),
      shared_memory_(dynamic_cast<GossamerBackend*>(backend_.get())),
      async_(!shared_memory_ || shared_memory_->hosts().size() > 1) {}

C10dCommunicator::~C10dCommunicator() {
  // The backend joins its threads, and one of them may be waiting for the GIL to free a tensor's Python object.
  std::optional<pybind11::gil_scoped_release> release;
  if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
  if (gave_up_ || getpid() != owner_) {
    // Leaked: a thread that sits in the operation until its timeout would be joined; a forked child has no threads.
    backend_.release();
  } else {
    backend_.reset();
  }
}

template <class Start>
PendingPtr C10dCommunicator::start(const char* operation, int64_t bytes, int64_t bytes_to_peers,
                                   Start&& start) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  try {
    start(works);
  } catch (const std::exception& error) {
    // Refused before anything was sent, an unsupported dtype for example: the group is as good as before.
    throw PythonError(ErrorKind::comm, std::string(operation) + " of " + readable_bytes(bytes) +
                                           " was refused on rank " + std::to_string(rank()) + "/" +
                                           std::to_string(size()) + ": " + first_line(error.what()));
  }
  count_sent(bytes_to_peers);
  return std::make_unique<C10dPending>(std::move(works), operation, bytes, this);
}

// A rank that dies breaks its neighbours' operations at once, but those who wait for a neighbour would wait for
// the whole timeout. So whoever fails says so in the store, and whoever waits looks there once a second.
void C10dCommunicator::wait(c10d::Work& work) {
  const bool interruptible = store_ && backend_->getBackendName() == "gloo" &&
                             work.retrieveOpType() != c10d::OpType::SEND &&
                             work.retrieveOpType() != c10d::OpType::RECV;
  if (!interruptible) {
    work.wait();
    return;
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

std::string C10dCommunicator::key(const std::string& leaf) const { return "gossamer/" + name_ + "/" + leaf; }

void C10dCommunicator::fail(const char* operation, int64_t bytes, const std::exception& error) {
  const std::string reason = first_line(error.what());
  if (shared_memory_) throw PythonError(ErrorKind::comm, reason);  // which names the operation and the ranks
  std::ostringstream message;
  message << operation << " of " << readable_bytes(bytes) << " failed on rank " << rank() << "/" << size()
          << ": " << reason << "; " << roll_call();
  throw PythonError(ErrorKind::comm, message.str());
}

void C10dCommunicator::require(const at::Tensor& x, const char* operation) const {
  if (x.device().type() != device_.type() || !x.is_contiguous()) {
    std::ostringstream message;
    message << operation << ": tensors must be contiguous and on " << device_ << ", got "
            << (x.is_contiguous() ? "contiguous" : "strided") << " on " << x.device();
    throw PythonError(ErrorKind::config, message.str());
  }
}

PendingPtr C10dCommunicator::all_reduce(at::Tensor x, ReduceOp op) {
  require(x, "all_reduce");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  return start("all_reduce", bytes, 2 * bytes * (size() - 1) / size(), [&](auto& works) {
    auto tensors = detached(x);
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    options.asyncOp = async_;
    works.push_back(backend_->allreduce(tensors, options));
  });
}

PendingPtr C10dCommunicator::reduce_scatter(at::Tensor out, at::Tensor x) {
  require(x, "reduce_scatter");
  require(out, "reduce_scatter");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  return start("reduce_scatter", bytes, bytes * (size() - 1) / size(),
               [&, out = out.detach(), x = x.detach()](auto& works) mutable {
                 c10d::ReduceScatterOptions options;
                 options.asyncOp = async_;
                 works.push_back(backend_->_reduce_scatter_base(out, x, options));
               });
}

PendingPtr C10dCommunicator::all_gather(at::Tensor out, at::Tensor x) {
  require(x, "all_gather");
  require(out, "all_gather");
  const int64_t bytes = static_cast<int64_t>(out.nbytes());
  return start("all_gather", bytes, bytes * (size() - 1) / size(),
               [&, out = out.detach(), x = x.detach()](auto& works) mutable {
                 c10d::AllgatherOptions options;
                 options.asyncOp = async_;
                 works.push_back(backend_->_allgather_base(out, x, options));
               });
}

PendingPtr C10dCommunicator::all_to_all(at::Tensor out, at::Tensor x) {
  require(x, "all_to_all");
  require(out, "all_to_all");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  return start("all_to_all", bytes, bytes * (size() - 1) / size(),
               [&, out = out.detach(), x = x.detach()](auto& works) mutable {
                 std::vector<int64_t> equal;
                 std::vector<int64_t> equal_too;
                 c10d::AllToAllOptions options;
                 options.asyncOp = async_;
                 works.push_back(backend_->alltoall_base(out, x, equal, equal_too, options));
               });
}

PendingPtr C10dCommunicator::broadcast(at::Tensor x, int source) {
  require(x, "broadcast");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  // A chain or a tree: every rank but the last forwards the tensor about once.
  return start("broadcast", bytes, rank() == source ? bytes : 0, [&](auto& works) {
    auto tensors = detached(x);
    c10d::BroadcastOptions options;
    options.rootRank = source;
    options.asyncOp = async_;
    works.push_back(backend_->broadcast(tensors, options));
  });
}

PendingPtr C10dCommunicator::exchange(at::Tensor out, at::Tensor x, int to, int source) {
  require(x, "exchange");
  require(out, "exchange");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  if (to == rank() && source == rank()) {
    out.copy_(x);
    return start("exchange", bytes, 0, [](auto&) {});
  }
  return start("exchange", bytes, bytes, [&](auto& works) {
    auto outgoing = detached(x);
    auto incoming = detached(out);
    const bool grouped = backend_->supportsCoalescing();  // NCCL deadlocks unless the two are one group
    if (grouped) backend_->startCoalescing();
    auto sent = backend_->send(outgoing, to, 0);
    auto received = backend_->recv(incoming, source, 0);
    if (grouped) {
      works.push_back(backend_->endCoalescing());
    } else {
      works.push_back(std::move(sent));
      works.push_back(std::move(received));
    }
  });
}

at::Tensor C10dCommunicator::allocate(int64_t bytes) {
  return shared_memory_ ? shared_memory_->allocate(bytes) : Communicator::allocate(bytes);
}

std::string C10dCommunicator::capture_refusal() const {
  if (backend_->getBackendName() == "nccl") return "";
  return "its group uses '" + backend_->getBackendName() +
         "' for CUDA tensors, which takes them through the host; use NCCL, or process_group=gs.Symmetric() "
         "on one host";
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
