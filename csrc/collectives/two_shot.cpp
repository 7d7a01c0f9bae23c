// See two_shot.h. Two hops of wire bytes, with the codec's fused middle between them.
#include "collectives/two_shot.h"

#include <ATen/DeviceGuard.h>

#include <algorithm>

#include "codec/codec_list.h"
#include "collectives/pieces.h"
#include "device_kernels.h"
#include "errors.h"
#include "float_dtype.h"
#include "observe/recorder.h"
#include "route/peers.h"

namespace gossamer {
namespace {

constexpr uintptr_t kRowAlignment = 16;  // bytes; of rows that a device's kernels read and write

at::Tensor as_bytes(const at::Tensor& x) { return x.view({x.numel()}).view(at::kByte); }

void check_parts(const char* where, const at::Tensor& whole, const at::Tensor& part, int size) {
  check_argument(whole.numel() == part.numel() * size && whole.scalar_type() == part.scalar_type(), where,
                 ": the large tensor must hold ", size,
                 " times the small one's elements in the same dtype, got ", whole.numel(), " ",
                 whole.scalar_type(), " and ", part.numel(), " ", part.scalar_type());
}

}  // namespace

Dtype to_dtype(at::ScalarType type, const char* where) {
  if (const auto dtype = float_dtype(type)) return *dtype;
  raise_python(ErrorKind::codec, where, ": dtype must be float32, float64, float16 or bfloat16, got ", type);
}

uint64_t CodecChoice::key(uint64_t nonce, Phase phase, int rank) const {
  return stochastic ? codec::make_key(seed, nonce, static_cast<uint64_t>(phase), static_cast<uint64_t>(rank))
                    : 0;
}

bool CodecChoice::is_divisible() const {
  return !codec::has_row_statistics({kind, Dtype::f32, block}) && !stochastic;
}

codec::Spec CodecChoice::spec(at::ScalarType type) const { return {kind, to_dtype(type, "codec"), block}; }

namespace two_shot {

void all_reduce(Communicator& comm, const CodecChoice& codec, at::Tensor x, double scale, Scratch& scratch,
                uint64_t nonce, const Around& around) {
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  auto spec = codec.spec(x.scalar_type());
  const auto& kernels = device_kernels(x.device().type());
  const int64_t n = comm.size();
  const int64_t numel = x.numel();
  if (numel == 0) return;
  const int64_t chunk = chunk_numel(numel, comm.chunks(), spec.block);
  const auto call = [chunk](const Around::Part& part, int64_t begin, int64_t length) {
    if (part) part(chunk, begin, length);
  };
  if (ByHosts* hosts = comm.by_hosts()) {
    const auto across = [&](Communicator& level, const at::Tensor& part, double factor, const at::Tensor&,
                            const Around& inner) {
      all_reduce(level, codec, part, factor, scratch, nonce, inner);
    };
    call(around.before, 0, chunk);
    sum_by_hosts(*hosts, x, scale, spec.block, at::Tensor(), across);
    return call(around.after, 0, chunk);
  }
  const bool exact = spec.kind == codec::Kind::identity;
  const bool direct = exact && comm.peers_of(x) != nullptr;
  if (n == 1 || direct) call(around.before, 0, chunk);
  if (n == 1) kernels.scale(spec.dtype, x.data_ptr(), numel, scale);
  if (n == 1 || (direct && sum_in_place(comm, x, scale))) return call(around.after, 0, chunk);

  const int64_t row_bytes = codec::row_bytes(spec, chunk);
  const int64_t valid = std::clamp<int64_t>(numel - comm.rank() * chunk, 0, chunk);
  const codec::Rows rows{n, chunk, numel};
  // Uncoded chunks that fill whole rows are sent from the tensor itself, and gathered into it. What travels is the same
  // otherwise, so each rank decides for itself. Kernels want rows aligned.
  const bool aligned = x.is_cpu() || reinterpret_cast<uintptr_t>(x.data_ptr()) % kRowAlignment == 0;
  const bool whole_rows = exact && aligned && n * row_bytes == static_cast<int64_t>(x.nbytes());
  const at::Tensor whole = whole_rows ? as_bytes(x) : at::Tensor();
  const RowsPtr way =
      open_rows(comm, scratch, {spec, chunk, codec.is_divisible(), x.device(), Hops::both, whole});
  void* sum = memory_for_sum(scratch, spec, chunk, x.device());

  spec.key = codec.key(nonce, Phase::first, comm.rank());
  for (const auto& piece : way->pieces()) {
    call(around.before, piece.begin, piece.numel);
    if (!way->in_place()) encode_piece(kernels, spec, x, rows, piece, way->send(piece));
    way->post(piece);
  }
  spec.key = codec.key(nonce, Phase::reduced, comm.rank());
  for (const auto& piece : way->pieces()) {
    const codec::WireRows received = way->swap(piece);
    const int64_t filled = std::clamp<int64_t>(valid - piece.begin, 0, piece.numel);
    {
      const observe::Span span("reduce", "codec", piece.row_bytes);
      kernels.reduce_encode(spec, received, n, piece.numel, filled, scale, way->own(piece), sum);
    }
    way->share(piece);
  }
  for (const auto& piece : way->pieces()) {
    const codec::WireRows results = way->gather(piece);
    if (!way->in_place()) decode_piece(kernels, spec, results, rows, piece, x);
    call(around.after, piece.begin, piece.numel);
  }
}

void all_reduce(Communicator& comm, at::Tensor x, Scratch& scratch) {
  ByHosts* hosts = comm.by_hosts();
  const bool by_hosts = hosts != nullptr && (x.is_cpu() || hosts->inside().shares_memory());
  if ((by_hosts || comm.sums_by_rows()) && float_dtype(x.scalar_type()))
    return all_reduce(comm, {codec::Kind::identity, 1}, x, 1.0, scratch);
  if (!sum_in_place(comm, x, 1.0)) comm.all_reduce(x, ReduceOp::sum)->wait();
}

void reduce_scatter(Communicator& comm, const CodecChoice& codec, at::Tensor out, at::Tensor x, double scale,
                    Scratch& scratch, uint64_t nonce) {
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  auto spec = codec.spec(x.scalar_type());
  const auto& kernels = device_kernels(x.device().type());
  const int64_t n = comm.size();
  const int64_t chunk = out.numel();
  check_parts("reduce_scatter", x, out, comm.size());
  if (chunk == 0) return;

  const RowsPtr way = open_rows(comm, scratch, {spec, chunk, codec.is_divisible(), x.device(), Hops::first});
  spec.key = codec.key(nonce, Phase::first, comm.rank());
  for (const auto& piece : way->pieces()) {
    encode_piece(kernels, spec, x, {n, chunk, x.numel()}, piece, way->send(piece));
    way->post(piece);
  }
  const auto wide = accumulate_dtype(spec.dtype);
  at::Tensor sum = scratch.sum(chunk * element_size(wide), x.device())
                       .view(wide == Dtype::f64 ? at::kDouble : at::kFloat)
                       .zero_();
  for (const auto& piece : way->pieces()) {
    const at::Tensor part = sum.narrow(0, piece.begin, piece.numel);
    kernels.decode_add(spec, way->swap(piece), n, piece.numel, piece.numel, part.data_ptr());
  }
  kernels.scale(wide, sum.data_ptr(), chunk, scale);
  out.copy_(sum.view(out.sizes()));
}

void all_gather(Communicator& comm, const CodecChoice& codec, at::Tensor out, at::Tensor x, Scratch& scratch,
                uint64_t nonce) {
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  auto spec = codec.spec(x.scalar_type());
  const auto& kernels = device_kernels(x.device().type());
  const int64_t n = comm.size();
  const int64_t chunk = x.numel();
  check_parts("all_gather", out, x, comm.size());
  if (chunk == 0) return;

  const RowsPtr way = open_rows(comm, scratch, {spec, chunk, codec.is_divisible(), x.device(), Hops::second});
  spec.key = codec.key(nonce, Phase::first, comm.rank());
  for (const auto& piece : way->pieces()) {
    encode_piece(kernels, spec, x, {1, chunk, chunk}, piece, way->own(piece));
    way->share(piece);
  }
  for (const auto& piece : way->pieces())
    decode_piece(kernels, spec, way->gather(piece), {n, chunk, out.numel()}, piece, out);
}

}  // namespace two_shot
}  // namespace gossamer
