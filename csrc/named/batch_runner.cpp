// The frame around a batch: streams, memory, failures. See batch_runner.h.
#include "named/batch_runner.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "device_kernels.h"
#include "errors.h"
#include "named/elements.h"

namespace gossamer::named {

using negotiate::Collective;

namespace {

constexpr int64_t kSmallestScratch = int64_t{1} << 20;
constexpr int64_t kSmallBytes = 16 << 10;  // of a batch

bool reduces(Collective kind) { return kind == Collective::allreduce || kind == Collective::reducescatter; }

}  // namespace

std::string BatchRunner::complaint(Collective kind, negotiate::Aggregate op, const at::Tensor& tensor) const {
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) return "the tensor must be dense";
  const auto device = devices_.find(c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true));
  if (device == devices_.end())
    return "this process set has no backend for tensors on " + tensor.device().str();
  if (tensor.is_cpu()) return reduces(kind) ? reduction_complaint(tensor.scalar_type(), op) : "";
  const at::Device own = device->second->device();
  if (tensor.device() != own) {
    return "the tensor must be on " + own.str() +
           ", the current device when the process set was opened, got " + tensor.device().str();
  }
  if (device_kernels(own.type()).is_capturing()) {
    return "a CUDA graph cannot hold it, since ranks agree on it on the host; do it outside of the capture";
  }
  return reduces(kind) ? reduction_complaint(tensor.scalar_type(), op) : "";
}

void BatchRunner::announce_failure() noexcept {
  for (auto& [device, comm] : devices_) comm->announce_failure();
  if (near_) near_->announce_failure();
}

void BatchRunner::run(const std::vector<negotiate::Part>& parts) {
  try {
    run_on(carrier(parts), parts);
  } catch (const std::exception& error) {
    announce_failure();
    raise(ErrorKind::comm, first_line(error.what()));
  }
}

// A small sum waits for the other ranks, and not for its bytes. All ranks choose alike.
Communicator& BatchRunner::carrier(const std::vector<negotiate::Part>& parts) {
  const negotiate::Request& request = parts.front().response->request;
  Communicator& own = *devices_.at(request.device);
  const bool sums = request.kind == Collective::allreduce && request.op != negotiate::Aggregate::adasum;
  if (!near_ || !sums || !own.device().is_cpu()) return own;
  int64_t bytes = 0;
  for (const negotiate::Part& part : parts) bytes += part.response->bytes;
  return bytes <= kSmallBytes ? *near_ : own;
}

void BatchRunner::run_on(Communicator& comm, const std::vector<negotiate::Part>& parts) {
  const Collective kind = parts.front().response->request.kind;
  c10::OptionalStreamGuard guard;
  std::optional<c10::Stream> stream;
  if (!comm.device().is_cpu()) {
    const c10::impl::VirtualGuardImpl devices(comm.device().type());
    auto found = streams_.find(comm.device().index());
    if (found == streams_.end()) {
      const auto side = devices.getStreamFromGlobalPool(comm.device(), /*isHighPriority=*/true);
      found = streams_.emplace(comm.device().index(), side).first;
    }
    stream = found->second;
    guard.reset_stream(*stream);
  }
  Pieces pieces = prepare(comm, parts);
  if (kind == Collective::allreduce) {
    allreduce(comm, pieces);
  } else if (kind == Collective::reducescatter) {
    reducescatter(comm, pieces);
  } else if (kind == Collective::allgather) {
    allgather(comm, pieces);
  } else {
    for (Piece& piece : pieces)
      kind == Collective::broadcast ? broadcast(comm, piece) : alltoall(comm, piece);
  }
  if (!stream) return;
  for (Piece& piece : pieces) {
    if (piece.data == nullptr) continue;
    piece.data->finished.emplace(comm.device().type());
    piece.data->finished->record(*stream);
  }
}

BatchRunner::Pieces BatchRunner::prepare(Communicator& comm, const std::vector<negotiate::Part>& parts) {
  Pieces pieces;
  for (const negotiate::Part& part : parts) {
    const negotiate::Request& request = part.response->request;
    if (!part.operation) {
      const auto options = at::TensorOptions().dtype(dtype_of(request.dtype)).device(comm.device());
      pieces.push_back({part.response.get(), nullptr, at::zeros(request.shape, options)});
      continue;
    }
    auto& data = std::static_pointer_cast<Ticket>(part.operation->payload)->data();
    if (data.submitted) {
      const c10::impl::VirtualGuardImpl devices(comm.device().type());
      const auto stream = devices.getStream(comm.device());
      data.submitted->block(stream);
      devices.recordDataPtrOnStream(data.input.storage().data_ptr(), stream);
    }
    pieces.push_back({part.response.get(), &data, data.input.contiguous()});
  }
  return pieces;
}

at::Tensor BatchRunner::scratch(Communicator& comm, int64_t bytes) {
  at::Tensor& memory = scratch_[&comm];
  if (!memory.defined() || memory.numel() < bytes) {
    int64_t capacity = kSmallestScratch;
    while (capacity < bytes) capacity *= 2;
    memory.reset();
    memory = comm.allocate(capacity);
  }
  return memory.narrow(0, 0, bytes);
}

uint64_t BatchRunner::total(uint64_t (Communicator::*bytes)() const) const {
  uint64_t sum = near_ ? (near_.get()->*bytes)() : 0;
  for (const auto& [device, comm] : devices_) sum += (comm.get()->*bytes)();
  return sum;
}

}  // namespace gossamer::named
