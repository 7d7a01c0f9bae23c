// allreduce and reducescatter of executor.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "device_kernels.h"
#include "float_dtype.h"
#include "named/adasum.h"
#include "named/elements.h"
#include "named/executor.h"

namespace gossamer::named {

using negotiate::Reduction;

namespace {

// Larger ones go alone: packing them costs more than another call of the backend.
int64_t largest_packed(const at::Device& device) { return int64_t{device.is_cpu() ? 512 << 10 : 4 << 20}; }

c10d::ReduceOp to_c10d(Reduction op) {
  switch (op) {
    case Reduction::min: return c10d::ReduceOp::MIN;
    case Reduction::max: return c10d::ReduceOp::MAX;
    case Reduction::product: return c10d::ReduceOp::PRODUCT;
    default: return c10d::ReduceOp::SUM;
  }
}

// The same reduction in a type that every backend has. `wide` means that the result must be copied back.
struct Dressed {
  at::Tensor tensor;
  Reduction op;
  bool wide;
};

Dressed dress(const at::Tensor& x, Reduction op, bool any_type) {
  switch (x.scalar_type()) {
    case at::kBool: {  // as torch has it: a sum is "any", a product "all"
      const bool all = op == Reduction::product || op == Reduction::min;
      return {x.view(at::kByte), all ? Reduction::min : Reduction::max, false};
    }
    case at::kComplexFloat:
    case at::kComplexDouble: return {at::view_as_real(x).view({-1}), op, false};
    case at::kUInt64: return {x.view(at::kLong), op, false};
    case at::kShort:
    case at::kUInt16:
    case at::kUInt32:
      if (!any_type) return {x.to(at::kLong), op, true};
      [[fallthrough]];
    default: return {x, op, false};
  }
}

// Factor after the reduction.
double last_factor(const negotiate::Request& request, int size) {
  return request.op == Reduction::average ? request.postscale / size : request.postscale;
}

int64_t rows_of(int64_t rows, int size, int rank) { return rows / size + (rank < rows % size ? 1 : 0); }

}  // namespace

Executor::Reducing Executor::begin(C10dCommunicator& comm, const at::Tensor& flat, Reduction op) {
  const auto dressed = dress(flat.view({-1}), op, comm.backend()->getBackendName() == "gossamer");
  std::vector<at::Tensor> tensors{dressed.tensor};
  c10d::AllreduceOptions how;
  how.reduceOp = to_c10d(dressed.op);
  how.asyncOp = false;
  return {flat, dressed.tensor, dressed.wide, comm.backend()->allreduce(tensors, how)};
}

void Executor::end(C10dCommunicator& comm, const Reducing& reducing) {
  wait(comm, reducing.work, "allreduce", static_cast<int64_t>(reducing.flat.nbytes()));
  if (reducing.wide) reducing.flat.view({-1}).copy_(reducing.dressed);
}

void Executor::reduce(C10dCommunicator& comm, const at::Tensor& flat, Reduction op,
                      const std::vector<int64_t>& lengths) {
  if (flat.numel() == 0) return;
  if (op != Reduction::adasum) return end(comm, begin(comm, flat, op));
  AdasumOptions options;
  options.scratch = &adasum_scratch_[&comm];
  adasum(*comm.backend(), flat.view({-1}), lengths, options);
}

void Executor::finish(Piece& piece, const at::Tensor& result) {
  if (piece.data == nullptr) return;
  at::Tensor& target = piece.data->target;
  if (!target.defined() && piece.data->input.is_contiguous()) {
    piece.data->output = result;
    return;
  }
  if (!target.defined()) target = at::empty_like(piece.data->input);  // in the order of its strides
  if (target.data_ptr() != result.data_ptr() || !target.is_contiguous()) target.copy_(result);
  piece.data->output = target;
}

void Executor::allreduce(C10dCommunicator& comm, Pieces& pieces) {
  Pieces small;
  std::vector<Piece*> large;
  for (Piece& piece : pieces) {
    if (pieces.size() > 1 && piece.response->bytes <= largest_packed(comm.device())) {
      small.push_back(piece);
    } else {
      large.push_back(&piece);
    }
  }
  allreduce_alone(comm, large);
  if (!small.empty()) allreduce_packed(comm, small);
}

// Each begins before the one before it is over: a backend may have several on their way.
void Executor::allreduce_alone(C10dCommunicator& comm, const std::vector<Piece*>& pieces) {
  std::vector<Reducing> begun;
  std::vector<at::Tensor> outs;
  for (Piece* piece : pieces) {
    const negotiate::Request& request = piece->response->request;
    const bool ours = piece->data == nullptr || piece->data->target.defined() ||
                      !piece->input.is_alias_of(piece->data->input);  // may be written to
    outs.push_back(ours ? piece->input : piece->input.clone());
    scale(outs.back(), request.prescale);
    if (request.op == Reduction::adasum || outs.back().numel() == 0) {
      reduce(comm, outs.back(), request.op, {outs.back().numel()});
    } else {
      begun.push_back(begin(comm, outs.back(), request.op));
    }
  }
  for (size_t i = 0; i < begun.size(); ++i) {
    try {
      end(comm, begun[i]);
    } catch (...) {
      std::vector<c10::intrusive_ptr<c10d::Work>> rest;
      for (size_t later = i + 1; later < begun.size(); ++later) rest.push_back(begun[later].work);
      comm.leave(std::move(rest));
      throw;
    }
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    scale(outs[i], last_factor(pieces[i]->response->request, comm.size()));
    finish(*pieces[i], outs[i]);
  }
}

void Executor::allreduce_packed(C10dCommunicator& comm, Pieces& pieces) {
  const negotiate::Request& request = pieces.front().response->request;
  const auto type = pieces.front().input.scalar_type();
  const auto device = pieces.front().input.device();
  const auto dtype = float_dtype(type);
  std::vector<int64_t> lengths;
  std::vector<flat::Segment> segments;
  int64_t numel = 0;
  for (const Piece& piece : pieces) {
    lengths.push_back(piece.input.numel());
    segments.push_back(
        {piece.input.numel() > 0 ? piece.input.data_ptr() : nullptr, numel, piece.input.numel()});
    numel += piece.input.numel();
  }
  const at::Tensor flat = scratch(comm, numel * request.element_bytes).view(type);
  const double after = last_factor(request, comm.size());
  const DeviceKernels& kernels = device_kernels(device.type());
  const auto count = static_cast<int64_t>(segments.size());
  if (dtype) {
    kernels.gather(*dtype, segments.data(), count, flat.data_ptr(),
                   effective_factor(request.prescale, type, device));
  } else {
    for (size_t i = 0; i < pieces.size(); ++i) {
      flat.narrow(0, segments[i].offset, lengths[i]).copy_(pieces[i].input.view({-1}));
    }
    scale(flat, request.prescale);
  }
  reduce(comm, flat, request.op, lengths);
  if (!dtype) scale(flat, after);
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i < pieces.size(); ++i) {
    Piece& piece = pieces[i];
    const bool in_place = piece.data == nullptr || piece.data->target.defined();
    outs.push_back(in_place ? piece.input : at::empty(piece.input.sizes(), piece.input.options()));
    segments[i].tensor = outs[i].numel() > 0 ? outs[i].data_ptr() : nullptr;
    if (!dtype) outs[i].view({-1}).copy_(flat.narrow(0, segments[i].offset, lengths[i]));
  }
  if (dtype) {
    kernels.scatter(*dtype, segments.data(), count, flat.data_ptr(), effective_factor(after, type, device));
  }
  for (size_t i = 0; i < pieces.size(); ++i) finish(pieces[i], outs[i]);
}

void Executor::reducescatter(C10dCommunicator& comm, Pieces& pieces) {
  const negotiate::Request& request = pieces.front().response->request;
  const int size = comm.size();
  const auto options = pieces.front().input.options();
  std::vector<int64_t> rows(pieces.size()), row_numel(pieces.size());
  std::vector<int64_t> numels(size);  // that each rank keeps
  for (size_t i = 0; i < pieces.size(); ++i) {
    rows[i] = pieces[i].input.size(0);
    row_numel[i] = rows[i] == 0 ? 0 : pieces[i].input.numel() / rows[i];
    for (int rank = 0; rank < size; ++rank) numels[rank] += rows_of(rows[i], size, rank) * row_numel[i];
  }
  const int64_t most = numels[0];  // the first ranks get the rows that are left over
  const bool equal = numels[size - 1] == most;
  at::Tensor in = pieces.front().input.view({-1});
  const bool packs = pieces.size() > 1 || !equal;
  if (packs) {  // rank by rank, each part as long as the longest
    in = at::zeros({most * size}, options);
    for (int rank = 0; rank < size; ++rank) {
      int64_t at = rank * most;
      for (size_t i = 0; i < pieces.size(); ++i) {
        int64_t first = 0;
        for (int before = 0; before < rank; ++before) first += rows_of(rows[i], size, before);
        const int64_t numel = rows_of(rows[i], size, rank) * row_numel[i];
        in.narrow(0, at, numel).copy_(pieces[i].input.view({-1}).narrow(0, first * row_numel[i], numel));
        at += numel;
      }
    }
  } else if (request.prescale != 1.0 && in.is_alias_of(pieces.front().data->input)) {
    in = in.clone();
  }
  scale(in, request.prescale);
  const at::Tensor out = at::empty({most}, options);
  if (most > 0) {
    const bool any_type = comm.backend()->getBackendName() == "gossamer";
    auto from = dress(in, request.op, any_type);
    auto to = dress(out, request.op, any_type);
    c10d::ReduceScatterOptions how;
    how.reduceOp = to_c10d(from.op);
    how.asyncOp = false;
    wait(comm, comm.backend()->_reduce_scatter_base(to.tensor, from.tensor, how), "reducescatter",
         static_cast<int64_t>(in.nbytes()));
    if (to.wide) out.copy_(to.tensor);
  }
  scale(out, last_factor(request, size));
  int64_t at = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    auto shape = pieces[i].input.sizes().vec();
    shape[0] = rows_of(rows[i], size, comm.rank());
    const int64_t numel = shape[0] * row_numel[i];
    const auto part = out.narrow(0, at, numel).view(shape);
    pieces[i].data->output = pieces.size() > 1 ? part.clone() : part;  // else one would hold all the memory
    at += numel;
  }
}

}  // namespace gossamer::named
