// allreduce and reducescatter of batch_runner.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "device_kernels.h"
#include "float_dtype.h"
#include "named/adasum.h"
#include "named/batch_runner.h"
#include "named/elements.h"

namespace gossamer::named {

using negotiate::Aggregate;

namespace {

// Small tensors are packed; packing a large one costs more than another operation. A sum by hosts is always packed: it is
// computed in memory that the ranks of a host share, and scaled on the way in and out.
bool goes_packed(Communicator& comm, const negotiate::Response& response, const at::Tensor& input,
                 size_t pieces) {
  const Aggregate op = response.request.op;
  const bool sums = op == Aggregate::sum || op == Aggregate::average;
  if (comm.by_hosts() != nullptr && sums && float_dtype(input.scalar_type())) return true;
  return pieces > 1 && response.bytes <= int64_t{input.is_cpu() ? 512 << 10 : 4 << 20};
}

// An equal reduction in a type that the communicator supports. `wide`: the result must be copied back.
struct Dressed {
  at::Tensor tensor;
  ReduceOp op;
  bool wide;
};

Dressed dress(const at::Tensor& x, Aggregate reduction, const Communicator& comm) {
  const ReduceOp op = reduction == Aggregate::min       ? ReduceOp::min
                      : reduction == Aggregate::max     ? ReduceOp::max
                      : reduction == Aggregate::product ? ReduceOp::product
                                                        : ReduceOp::sum;
  switch (x.scalar_type()) {
    case at::kBool: {  // as torch has it: a sum is "any", a product "all"
      const bool all = op == ReduceOp::product || op == ReduceOp::min;
      return {x.view(at::kByte), all ? ReduceOp::min : ReduceOp::max, false};
    }
    case at::kComplexFloat:
    case at::kComplexDouble: return {at::view_as_real(x).view({-1}), op, false};
    case at::kUInt64: return {x.view(at::kLong), op, false};
    case at::kShort:
    case at::kUInt16:
    case at::kUInt32:
      if (!comm.reduces_every_integer()) return {x.to(at::kLong), op, true};
      [[fallthrough]];
    default: return {x, op, false};
  }
}

// The factor after the reduction.
double last_factor(const negotiate::Request& request, int size) {
  return request.op == Aggregate::average ? request.postscale / size : request.postscale;
}

int64_t rows_of(int64_t rows, int size, int rank) { return rows / size + (rank < rows % size ? 1 : 0); }

}  // namespace

BatchRunner::Reducing BatchRunner::begin(Communicator& comm, const at::Tensor& flat, Aggregate op,
                                         const std::vector<int64_t>& lengths) {
  Reducing reducing{flat, {}, nullptr};
  if (flat.numel() == 0) return reducing;
  if (op == Aggregate::adasum) {
    adasum(comm, flat.view({-1}), lengths, {&adasum_scratch_[&comm]});
    return reducing;
  }
  const Dressed dressed = dress(flat.view({-1}), op, comm);
  if (dressed.wide) reducing.widened = dressed.tensor;
  if (comm.by_hosts() != nullptr && dressed.op == ReduceOp::sum) {
    two_shot::all_reduce(comm, dressed.tensor, wire_);
  } else {
    reducing.pending = comm.all_reduce(dressed.tensor, dressed.op);
  }
  return reducing;
}

void BatchRunner::end(const Reducing& reducing) {
  if (reducing.pending) reducing.pending->wait();
  if (reducing.widened.defined()) reducing.flat.view({-1}).copy_(reducing.widened);
}

void BatchRunner::finish(Piece& piece, const at::Tensor& result) {
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

void BatchRunner::allreduce(Communicator& comm, Pieces& pieces) {
  Pieces packed;
  std::vector<Piece*> alone;
  for (Piece& piece : pieces) {
    if (goes_packed(comm, *piece.response, piece.input, pieces.size())) {
      packed.push_back(piece);
    } else {
      alone.push_back(&piece);
    }
  }
  allreduce_alone(comm, alone);
  if (!packed.empty()) allreduce_packed(comm, packed);
}

// Each reduction begins before the one before it has ended: a communicator may have several in flight.
void BatchRunner::allreduce_alone(Communicator& comm, const std::vector<Piece*>& pieces) {
  std::vector<Reducing> begun;
  for (const Piece* piece : pieces) {
    const negotiate::Request& request = piece->response->request;
    const bool ours = piece->data == nullptr || piece->data->target.defined() ||
                      !piece->input.is_alias_of(piece->data->input);  // may be written to
    const at::Tensor out = ours ? piece->input : piece->input.clone();
    scale(out, request.prescale);
    begun.push_back(begin(comm, out, request.op, {out.numel()}));
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    end(begun[i]);
    scale(begun[i].flat, last_factor(pieces[i]->response->request, comm.size()));
    finish(*pieces[i], begun[i].flat);
  }
}

void BatchRunner::allreduce_packed(Communicator& comm, Pieces& pieces) {
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
  end(begin(comm, flat, request.op, lengths));
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

void BatchRunner::reducescatter(Communicator& comm, Pieces& pieces) {
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
  const int64_t most = numels[0];  // the first ranks get the rows that remain
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
    const Dressed from = dress(in, request.op, comm), to = dress(out, request.op, comm);
    comm.reduce_scatter(to.tensor, from.tensor, from.op)->wait();
    if (to.wide) out.copy_(to.tensor);
  }
  scale(out, last_factor(request, size));
  int64_t at = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    auto shape = pieces[i].input.sizes().vec();
    shape[0] = rows_of(rows[i], size, comm.rank());
    const int64_t numel = shape[0] * row_numel[i];
    const auto part = out.narrow(0, at, numel).view(shape);
    pieces[i].data->output = pieces.size() > 1 ? part.clone() : part;  // a view would keep all alive
    at += numel;
  }
}

}  // namespace gossamer::named
