// Calls into c10d::Backend; see c10d.h. Byte counts are what this rank's own algorithm-independent share is:
// every byte that leaves this rank for another, as the backend's operation is defined (a ring for all-reduce).
#include "comm/c10d.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <utility>

#include "backend/backend.h"
#include "errors.h"
#include "observe/recorder.h"

namespace gossamer {
namespace {

constexpr int64_t kLongRow = int64_t{64} << 10;  // bytes; see rows()
constexpr int64_t kLeastPiece = int64_t{32} << 10, kLargestPiece = int64_t{256} << 10;
constexpr double kPieceSeconds = 3e-3;  // of a slow link
constexpr int64_t kMostPieces = 32;
constexpr int kTrials = 3;      // operations with long rows that the link is judged by
constexpr int kSmallRings = 8;  // that its latency is judged by
constexpr double kSmallRingsSeconds = 0.1;
constexpr double kFastBytesPerSecond = 3e8;  // from 2.4 Gbit/s on

class C10dPending : public Pending {
 public:
  C10dPending(std::vector<c10::intrusive_ptr<c10d::Work>> works, const char* operation, int64_t bytes,
              C10dCommunicator* owner, observe::Flight flight, std::function<void()> finish)
      : works_(std::move(works)),
        flight_(std::move(flight)),
        operation_(operation),
        bytes_(bytes),
        owner_(owner),
        finish_(std::move(finish)) {}
  ~C10dPending() override { owner_->leave(std::move(works_)); }

  void wait() override {
    const auto works = std::exchange(works_, {});
    flight_.waiting();
    for (const auto& work : works) {
      try {
        owner_->wait(*work);
      } catch (const std::exception& error) {
        owner_->fail(operation_, bytes_, error);
      }
    }
    if (const auto finish = std::exchange(finish_, nullptr)) finish();
    flight_.done();
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  observe::Flight flight_;
  const char* operation_;
  int64_t bytes_;
  C10dCommunicator* owner_;
  std::function<void()> finish_;  // what is left to do with the result
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
      gloo_(backend_->getBackendName() == "gloo"),
      async_(!shared_memory_ || shared_memory_->hosts().size() > 1) {}

C10dCommunicator::~C10dCommunicator() {
  // The backend joins its threads, and one of them may be waiting for the GIL to free a tensor's Python object.
  std::optional<pybind11::gil_scoped_release> release;
  if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
  if (gave_up_ || leaves_unfinished() || getpid() != owner_) {
    // Leaked: a thread that sits in the operation until its timeout would be joined; a forked child has no threads.
    backend_.release();
  } else {
    backend_.reset();
  }
}

template <class Start>
PendingPtr C10dCommunicator::start(const char* operation, int64_t bytes, int64_t bytes_to_peers,
                                   Start&& start, std::function<void()> finish,
                                   std::optional<int64_t> bytes_from_peers) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  observe::Flight flight(operation, bytes);
  try {
    start(works);
  } catch (const std::exception& error) {
    // Refused before anything was sent, an unsupported dtype for example: the group is as good as before.
    throw PythonError(ErrorKind::comm, std::string(operation) + " of " + readable_bytes(bytes) +
                                           " was refused on rank " + std::to_string(rank()) + "/" +
                                           std::to_string(size()) + ": " + first_line(error.what()));
  }
  flight.posted();
  count(bytes_to_peers, bytes_from_peers.value_or(bytes_to_peers));
  return std::make_unique<C10dPending>(std::move(works), operation, bytes, this, std::move(flight),
                                       std::move(finish));
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
  if (gloo_) return sum_and_take_own(out.detach(), x.detach());
  return start("reduce_scatter", bytes, bytes * (size() - 1) / size(),
               [&, out = out.detach(), x = x.detach()](auto& works) mutable {
                 c10d::ReduceScatterOptions options;
                 options.asyncOp = async_;
                 works.push_back(backend_->_reduce_scatter_base(out, x, options));
               });
}

// What torch's own reduce-scatter on Gloo does; but the work that it returns takes no timeout, so whoever waits for it
// would not learn of a failure.
PendingPtr C10dCommunicator::sum_and_take_own(at::Tensor out, const at::Tensor& x) {
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  if (out.numel() * size() != x.numel() || out.dtype() != x.dtype()) {
    std::ostringstream message;
    message << "reduce_scatter: the input must hold " << size() << " parts of the output, got " << x.numel()
            << " elements of " << x.dtype() << " for " << out.numel() << " of " << out.dtype();
    throw PythonError(ErrorKind::config, message.str());
  }
  std::vector<at::Tensor> sum{x.clone()};
  const auto own = sum[0].view({size(), -1})[rank()].view_as(out);
  return start(
      "reduce_scatter", bytes, bytes * (size() - 1) / size(),
      [&](auto& works) {
        c10d::AllreduceOptions options;
        options.asyncOp = async_;
        works.push_back(backend_->allreduce(sum, options));
      },
      [out, own]() mutable { out.copy_(own); });
}

PendingPtr C10dCommunicator::all_gather(at::Tensor out, at::Tensor x) {
  require(x, "all_gather");
  require(out, "all_gather");
  const int64_t bytes = static_cast<int64_t>(out.nbytes());
  const auto post = [this](at::Tensor to, at::Tensor from) {
    c10d::AllgatherOptions options;
    options.asyncOp = async_;
    return backend_->_allgather_base(to, from, options);
  };
  return rows("all_gather", bytes, std::move(out), std::move(x), /*own_rows=*/1, post);
}

PendingPtr C10dCommunicator::all_to_all(at::Tensor out, at::Tensor x) {
  require(x, "all_to_all");
  require(out, "all_to_all");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  const auto post = [this](at::Tensor to, at::Tensor from) {
    std::vector<int64_t> equal, equal_too;
    c10d::AllToAllOptions options;
    options.asyncOp = async_;
    return backend_->alltoall_base(to, from, equal, equal_too, options);
  };
  return rows("all_to_all", bytes, std::move(out), std::move(x), /*own_rows=*/size(), post);
}

// On a slow link a whole row keeps a connection busy, and behind it stands Gloo's word that this rank receives, which the
// other direction waits for: one after the other is sent, in twice the time. And where several ranks send to one at
// the same moment, the links of the others have nothing to do. There long rows go in pieces of some milliseconds, of which
// Gloo's threads have two on their way at a time; on a fast link that would cost more than it saves.
template <class Post>
PendingPtr C10dCommunicator::rows(const char* operation, int64_t bytes, at::Tensor out, at::Tensor x,
                                  int64_t own_rows, const Post& post) {
  const int64_t to_peers = bytes * (size() - 1) / size();
  const int64_t row_bytes = own_rows > 0 ? static_cast<int64_t>(x.nbytes()) / own_rows : 0;
  const bool is_long = gloo_ && device_.is_cpu() && size() > 1 &&
                       row_bytes > (piece_bytes_ > 0 ? piece_bytes_ : kLongRow) &&
                       own_rows * row_bytes == static_cast<int64_t>(x.nbytes()) &&
                       size() * row_bytes == static_cast<int64_t>(out.nbytes());
  if (is_long && long_rows_ <= kTrials && ++long_rows_ > kTrials) decide_on_pieces();
  if (!is_long || piece_bytes_ == 0) {
    const auto begun = std::chrono::steady_clock::now();
    const auto measure = [this, begun, to_peers] {
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begun;
      seconds_per_byte_ = std::min(seconds_per_byte_, elapsed.count() / static_cast<double>(to_peers));
    };
    return start(
        operation, bytes, to_peers, [&](auto& works) { works.push_back(post(out.detach(), x.detach())); },
        is_long && long_rows_ <= kTrials ? std::function<void()>(measure) : nullptr);
  }
  const auto as_rows = [&](const at::Tensor& flat, int64_t count) {
    return at::from_blob(
        flat.data_ptr(), {count, row_bytes}, [flat](void*) {}, flat.options().dtype(at::kByte));
  };
  const at::Tensor from = as_rows(x.detach(), own_rows);
  const at::Tensor to = as_rows(out.detach(), size());
  const int64_t piece_bytes = std::max(piece_bytes_, row_bytes / kMostPieces);
  const auto received = std::make_shared<std::vector<at::Tensor>>();
  return start(
      operation, bytes, to_peers,
      [&](auto& works) {
        for (int64_t at = 0; at < row_bytes; at += piece_bytes) {
          const int64_t length = std::min(piece_bytes, row_bytes - at);
          received->push_back(at::empty({size(), length}, to.options()));
          works.push_back(post(received->back(), from.narrow(1, at, length).contiguous()));
        }
      },
      [to, received] {
        int64_t at = 0;
        for (const at::Tensor& piece : *received) {
          to.narrow(1, at, piece.size(1)).copy_(piece);
          at += piece.size(1);
        }
      });
}

// All ranks come here in the same operation, and decide alike.
void C10dCommunicator::decide_on_pieces() {
  const auto largest = [&](double own) {
    std::vector<at::Tensor> tensors{at::full({1}, own, at::kDouble)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    options.asyncOp = async_;
    wait(*backend_->allreduce(tensors, options));
    return tensors[0].item<double>();
  };
  const double bytes_per_second = 1 / largest(seconds_per_byte_);
  if (bytes_per_second >= kFastBytesPerSecond) return;
  piece_bytes_ =
      std::clamp(static_cast<int64_t>(bytes_per_second * kPieceSeconds), kLeastPiece, kLargestPiece);
  // Now that all are here: rings of small messages, one after the other. The best, which no computing has held up. Each
  // tells all ranks how long the one before took, so that they stop alike where messages take long.
  double ring_seconds = std::numeric_limits<double>::infinity(), own = 0, spent = 0;
  for (int ring = 0; ring < kSmallRings && spent < kSmallRingsSeconds; ++ring) {
    const auto begun = std::chrono::steady_clock::now();
    spent += largest(own);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begun;
    own = elapsed.count();
    ring_seconds = std::min(ring_seconds, own);
  }
  flight_bytes_ = static_cast<int64_t>(bytes_per_second * ring_seconds / (size() - 1));  // there and back
}

PendingPtr C10dCommunicator::broadcast(at::Tensor x, int source) {
  require(x, "broadcast");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  // A chain or a tree: every rank but the last forwards the tensor about once.
  const auto post = [&](auto& works) {
    auto tensors = detached(x);
    c10d::BroadcastOptions options;
    options.rootRank = source;
    options.asyncOp = async_;
    works.push_back(backend_->broadcast(tensors, options));
  };
  const bool sends = rank() == source;
  return start("broadcast", bytes, sends ? bytes : 0, post, {}, sends ? 0 : bytes);
}

PendingPtr C10dCommunicator::exchange(const std::vector<Swap>& swaps) {
  std::vector<Swap> across;
  int64_t bytes = 0, to_peers = 0;
  for (const Swap& swap : swaps) {
    require(swap.x, "exchange");
    require(swap.out, "exchange");
    bytes += static_cast<int64_t>(swap.x.nbytes());
    if (swap.to == rank() && swap.source == rank()) {
      at::Tensor(swap.out).copy_(swap.x);
      continue;
    }
    across.push_back({swap.out.detach(), swap.x.detach(), swap.to, swap.source});
    to_peers += static_cast<int64_t>(swap.x.nbytes());
  }
  return start("exchange", bytes, to_peers, [&](auto& works) {
    // NCCL deadlocks unless they are one group.
    const bool grouped = backend_->supportsCoalescing() && !across.empty();
    if (grouped) backend_->startCoalescing();
    // Receives first: Gloo tells the sender of each by the same connection, where that would come behind a message that
    // this rank has begun to send. Then one direction would not begin before the other has ended.
    for (const Swap& swap : across) {
      std::vector<at::Tensor> incoming{swap.out};
      works.push_back(backend_->recv(incoming, swap.source, 0));
    }
    for (const Swap& swap : across) {
      std::vector<at::Tensor> outgoing{swap.x};
      works.push_back(backend_->send(outgoing, swap.to, 0));
    }
    if (grouped) works = {backend_->endCoalescing()};
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

}  // namespace gossamer
