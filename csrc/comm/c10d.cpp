// Calls into c10d::Backend; see c10d.h. Byte counts are every byte that this rank sends to other ranks by the definition of
// the operation (a ring for all-reduce), whatever algorithm the backend uses.
#include "comm/c10d.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "backend/backend.h"
#include "backend/gil.h"
#include "backend/messages.h"
#include "errors.h"
#include "observe/recorder.h"

namespace gossamer {
namespace {

class C10dPending : public Pending {
 public:
  C10dPending(std::vector<c10::intrusive_ptr<c10d::Work>> works, const char* operation, int64_t bytes,
              C10dCommunicator* owner, observe::Flight flight, std::function<void()> finish, Turns::Turn turn)
      : works_(std::move(works)),
        turn_(std::move(turn)),
        flight_(std::move(flight)),
        operation_(operation),
        bytes_(bytes),
        owner_(owner),
        finish_(std::move(finish)) {}
  ~C10dPending() override { owner_->leave(std::move(works_)); }

  void wait() override {
    const auto works = std::exchange(works_, {});
    flight_.waiting();
    try {
      for (const auto& work : works)
        if (work)
          owner_->wait(*work);  // else it was done when it was posted, or is ordered in the current stream
      owner_->wait_for_device();
    } catch (const CallsDiffer&) {
      throw;
    } catch (const std::exception& error) {
      owner_->fail(operation_, bytes_, error);
    }
    if (const auto finish = std::exchange(finish_, nullptr)) finish();
    flight_.done();
    turn_.end();
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  Turns::Turn turn_;
  observe::Flight flight_;
  const char* operation_;
  int64_t bytes_;
  C10dCommunicator* owner_;
  std::function<void()> finish_;  // what is left to do with the result
};

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::max: return c10d::ReduceOp::MAX;
    case ReduceOp::min: return c10d::ReduceOp::MIN;
    case ReduceOp::product: return c10d::ReduceOp::PRODUCT;
    default: return c10d::ReduceOp::SUM;
  }
}

constexpr auto kShutdownTimeout = std::chrono::seconds(10);

// The same memory without a Python object. A backend's thread may drop the last reference to a tensor while the
// interpreter ends, and must not need the GIL for that.
std::vector<at::Tensor> detached(const at::Tensor& x) { return {x.tensor_data()}; }

}  // namespace

at::Tensor Communicator::allocate(int64_t bytes) {
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device()));
}

C10dCommunicator::C10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
                                   c10::intrusive_ptr<c10d::Store> store, std::string name,
                                   std::vector<int> ranks)
    : backend_(std::move(backend)),
      device_(device),
      store_(std::move(store)),
      name_(std::move(name)),
      ranks_(std::move(ranks)),
      shared_memory_(dynamic_cast<GossamerBackend*>(backend_.get())),
      gloo_(backend_->getBackendName() == "gloo"),
      nccl_(backend_->getBackendName() == "nccl"),
      async_(!nccl_ && (!shared_memory_ || shared_memory_->hosts().size() > 1)) {
  if (shared_memory_ && !ranks_.empty()) shared_memory_->name_ranks(ranks_);
}

C10dCommunicator::~C10dCommunicator() {
  // The backend joins its threads. One of them may wait for the GIL, to free a tensor's Python object.
  const WithoutGil without_gil;
  if (gave_up_ || leaves_unfinished() || getpid() != owner_) {
    // Leaked. The destructor would join a thread that waits for the operation's timeout; a forked child has no threads.
    backend_.release();
  } else {
    if (nccl_) finish_nccl();
    backend_.reset();
  }
}

// The ranks of a host leave NCCL together: shutdown() waits until each has called it. So it runs on a thread of its own, and
// ranks that drop their models in different orders do not wait for each other for ever.
void C10dCommunicator::finish_nccl() noexcept {
  if (backend_.use_count() > 1) return;                   // its owner lives on
  if (failed_ || gave_up_ || !trouble().empty()) return;  // the operations in flight may never end
  try {
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    auto ended = std::make_shared<std::promise<void>>();
    auto end = ended->get_future();
    std::thread([backend = std::move(backend_), ended]() mutable {
      try {
        backend->shutdown();
      } catch (const std::exception&) {
        // The destructor aborts what is left.
      }
      backend.reset();
      ended->set_value();
    }).detach();
    end.wait_for(kShutdownTimeout);
  } catch (const std::exception&) {
    // The device has failed. The destructor aborts what is left.
  }
}

template <class Start>
PendingPtr C10dCommunicator::start(const char* operation, int64_t bytes, int64_t bytes_to_peers,
                                   Start&& start, std::function<void()> finish,
                                   std::optional<int64_t> bytes_from_peers) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  auto turn = turns_.begin(operation);
  observe::Flight flight(operation, bytes);
  try {
    start(works);
  } catch (const std::exception& error) {
    leave(std::move(works));
    if (!disconnected().empty()) fail(operation, bytes, error);
    // Refused before anything was sent, for example an unsupported dtype: the group still works.
    raise_python(ErrorKind::comm, operation, " of ", readable_bytes(bytes), " was refused on rank ", place(),
                 ": ", first_line(error.what()));
  }
  flight.posted();
  count(bytes_to_peers, bytes_from_peers.value_or(bytes_to_peers));
  return std::make_unique<C10dPending>(std::move(works), operation, bytes, this, std::move(flight),
                                       std::move(finish), std::move(turn));
}

void C10dCommunicator::require(const at::Tensor& x, const char* operation) const {
  check_argument(x.device().type() == device_.type() && x.is_contiguous(), operation,
                 ": tensors must be contiguous and on ", device_, ", got ",
                 x.is_contiguous() ? "contiguous" : "strided", " on ", x.device());
}

PendingPtr C10dCommunicator::all_reduce(at::Tensor x, ReduceOp op) {
  require(x, "all_reduce");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  return start("all_reduce", bytes, 2 * bytes * (size() - 1) / size(), [&](auto& works) {
    auto tensors = async_ || nccl_ ? detached(x) : std::vector<at::Tensor>{std::move(x)};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    options.asyncOp = async_;
    works.push_back(backend_->allreduce(tensors, options));
  });
}

PendingPtr C10dCommunicator::reduce_scatter(at::Tensor out, at::Tensor x, ReduceOp op) {
  require(x, "reduce_scatter");
  require(out, "reduce_scatter");
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  if (gloo_) return reduce_and_take_own(out.detach(), x.detach(), op);
  return start("reduce_scatter", bytes, bytes * (size() - 1) / size(),
               [&, out = out.detach(), x = x.detach()](auto& works) mutable {
                 c10d::ReduceScatterOptions options;
                 options.reduceOp = to_c10d(op);
                 options.asyncOp = async_;
                 works.push_back(backend_->_reduce_scatter_base(out, x, options));
               });
}

// Does what torch's own reduce-scatter on Gloo does. The work that torch's returns takes no timeout, so a waiter would not
// learn of a failure.
PendingPtr C10dCommunicator::reduce_and_take_own(at::Tensor out, const at::Tensor& x, ReduceOp op) {
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  check_argument(out.numel() * size() == x.numel() && out.dtype() == x.dtype(),
                 "reduce_scatter: the input must hold ", size(), " parts of the output, got ", x.numel(),
                 " elements of ", x.dtype(), " for ", out.numel(), " of ", out.dtype());
  std::vector<at::Tensor> all{x.clone()};
  const auto own = all[0].view({size(), -1})[rank()].view_as(out);
  return start(
      "reduce_scatter", bytes, bytes * (size() - 1) / size(),
      [&](auto& works) {
        c10d::AllreduceOptions options;
        options.reduceOp = to_c10d(op);
        options.asyncOp = async_;
        works.push_back(backend_->allreduce(all, options));
      },
      [out, own]() mutable { out.copy_(own); });
}

PendingPtr C10dCommunicator::all_gather(at::Tensor out, at::Tensor x) {
  require(x, "all_gather");
  require(out, "all_gather");
  if (call_ != nullptr) return exchange("all_gather", as_swaps(out, x));
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
  if (call_ != nullptr) return exchange("all_to_all", as_swaps(out, x));
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  return start("all_to_all", bytes, bytes * (size() - 1) / size(),
               [&, out = out.detach(), x = x.detach()](auto& works) mutable {
                 std::vector<int64_t> equal, equal_too;
                 c10d::AllToAllOptions options;
                 options.asyncOp = async_;
                 works.push_back(backend_->alltoall_base(out, x, equal, equal_too, options));
               });
}

PendingPtr C10dCommunicator::all_to_all_unequal(at::Tensor out, at::Tensor x, std::vector<int64_t> out_bytes,
                                                std::vector<int64_t> x_bytes) {
  require(x, "all_to_all_unequal");
  require(out, "all_to_all_unequal");
  check_argument(x.scalar_type() == at::kByte && out.scalar_type() == at::kByte,
                 "all_to_all_unequal: tensors must be uint8, got ", x.scalar_type(), " and ",
                 out.scalar_type());
  const int64_t sent = x.numel() - x_bytes.at(rank()), received = out.numel() - out_bytes.at(rank());
  at::Tensor to = out.detach(), from = x.detach();
  const auto post = [&](auto& works) {
    c10d::AllToAllOptions options;
    options.asyncOp = async_;
    works.push_back(backend_->alltoall_base(to, from, out_bytes, x_bytes, options));
  };
  return start("all_to_all_unequal", x.numel(), sent, post, {}, received);
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

std::vector<Swap> C10dCommunicator::as_swaps(const at::Tensor& out, const at::Tensor& x) const {
  const bool parts = out.numel() == x.numel();
  const auto part = [this](const at::Tensor& whole, int of) {
    const int64_t numel = whole.numel() / size();
    return whole.view({whole.numel()}).narrow(0, of * numel, numel);
  };
  std::vector<Swap> swaps;
  for (int apart = 0; apart < size(); ++apart) {  // so that not all ranks send to the same one first
    const int to = (rank() + apart) % size(), source = (rank() + size() - apart) % size();
    swaps.push_back({part(out, source), parts ? part(x, to) : x, to, source});
  }
  return swaps;
}

PendingPtr C10dCommunicator::exchange(const char* operation, const std::vector<Swap>& swaps) {
  std::vector<Message> incoming, outgoing;
  int64_t sent = 0, received = 0, kept = 0;
  for (const Swap& swap : swaps) {
    for (const auto* x : {&swap.x, &swap.out})
      if (x->defined()) require(*x, operation);
    const int64_t x_bytes = swap.x.defined() ? static_cast<int64_t>(swap.x.nbytes()) : 0;
    const int64_t out_bytes = swap.out.defined() ? static_cast<int64_t>(swap.out.nbytes()) : 0;
    if (swap.to == rank() && swap.source == rank()) {
      at::Tensor(swap.out).copy_(swap.x);
      kept += x_bytes;
      continue;
    }
    if (out_bytes > 0) incoming.push_back({detached(swap.out), swap.source});
    if (x_bytes > 0) outgoing.push_back({detached(swap.x), swap.to});
    received += out_bytes;
    sent += x_bytes;
  }
  std::function<void()> finish;
  if (!device_.is_cpu() && !nccl_) {  // only NCCL sends a device's memory
    std::vector<std::pair<at::Tensor, at::Tensor>> landed;
    for (auto& [tensors, source] : incoming) {
      landed.emplace_back(tensors[0], at::empty_like(tensors[0], at::kCPU));
      tensors = {landed.back().second};
    }
    for (auto& [tensors, to] : outgoing) tensors = {tensors[0].cpu()};
    finish = [landed] {
      for (const auto& [out, host] : landed) out.copy_(host);
    };
  }
  const auto post = [&](auto& works) {
    // NCCL deadlocks unless the messages form one group.
    const bool grouped = backend_->supportsCoalescing() && incoming.size() + outgoing.size() > 0;
    if (grouped) backend_->startCoalescing();
    post_messages(*backend_, incoming, outgoing, call_ == nullptr ? 0 : call_->tag(), works);
    if (grouped) works = {backend_->endCoalescing()};
  };
  return start(operation, sent + kept, sent, post, std::move(finish), received);
}

at::Tensor C10dCommunicator::allocate(int64_t bytes) {
  return shared_memory_ ? shared_memory_->allocate(bytes) : Communicator::allocate(bytes);
}

std::string C10dCommunicator::capture_refusal() const {
  if (host_timeout_) return "in an elastic run the host waits for each operation of its group";
  if (nccl_) return "";
  return "its group uses '" + backend_->getBackendName() +
         "' for CUDA tensors, which takes them through the host; use NCCL, or process_group=gs.Symmetric() "
         "on one host";
}

}  // namespace gossamer
