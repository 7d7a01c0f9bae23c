// The two-shot all-reduce with error feedback: what a codec leaves out is added to the next call. See two_shot.h.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "collectives/hops.h"
#include "collectives/two_shot.h"
#include "device_kernels.h"
#include "observe/recorder.h"

namespace gossamer {
namespace two_shot {
namespace {

// A NaN or Inf has been seen by everyone; kept, it would come back in every later step.
void forget_what_is_not_finite(at::Tensor error) { error.nan_to_num_(0.0, 0.0, 0.0); }

}  // namespace

void all_reduce_with_error(Communicator& comm, const CodecChoice& codec, at::Tensor x, double scale,
                           Scratch& scratch, uint64_t nonce, at::Tensor error) {
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  const auto& kernels = device_kernels(x.device().type());
  const int64_t n = comm.size();
  const int64_t numel = x.numel();
  if (numel == 0) return;
  if (n == 1) return kernels.scale(to_dtype(x.scalar_type(), "all_reduce"), x.data_ptr(), numel, scale);

  auto spec = codec.spec(error.scalar_type());  // wide all the way: no rounding that the error does not see
  const int64_t chunk = chunk_numel(numel, n, spec.block);
  const int64_t begin = std::min(comm.rank() * chunk, numel);
  const int64_t valid = std::clamp<int64_t>(numel - begin, 0, chunk);
  const codec::Rows rows{n, chunk, numel};
  Hops hops(comm, scratch, x.device(), codec, spec, chunk);
  const at::Tensor left_out = error.view({numel});
  const at::Tensor decoded = at::empty_like(left_out);
  const at::Tensor flat = x.view({numel});
  const auto each_row = [&](const Hops::Piece& piece, const auto& call) {  // of what the piece has of both
    for (int64_t first = piece.begin; first < numel; first += chunk) {
      const int64_t length = std::min(piece.numel, numel - first);
      call(left_out.narrow(0, first, length), first, length);
    }
  };

  spec.key = codec.key(nonce, Phase::first, comm.rank());
  for (const auto& piece : hops.pieces()) {
    each_row(piece, [&](const at::Tensor& owed, int64_t first, int64_t length) {
      owed.add_(flat.narrow(0, first, length));
    });
    encode_piece(kernels, spec, left_out, rows, piece, hops.send(piece));
    hops.post(piece);
  }
  for (const auto& piece : hops.pieces()) {
    decode_piece(kernels, spec, hops.send(piece), rows, piece, decoded);
    each_row(piece, [&](const at::Tensor& owed, int64_t first, int64_t length) {
      owed.sub_(decoded.narrow(0, first, length));
    });
  }

  const at::Tensor sum = at::empty({chunk}, left_out.options());
  spec.key = codec.key(nonce, Phase::reduced, comm.rank());
  for (const auto& piece : hops.pieces()) {
    const codec::WireRows received = hops.swap(piece);
    const int64_t filled = std::clamp<int64_t>(valid - piece.begin, 0, piece.numel);
    std::optional<observe::Span> reducing(std::in_place, "reduce", "codec", piece.row_bytes);
    const at::Tensor part = sum.narrow(0, 0, piece.numel).zero_();
    kernels.decode_add(spec, received, n, piece.numel, filled, part.data_ptr());
    kernels.scale(spec.dtype, part.data_ptr(), filled, scale);
    kernels.encode(spec, spec.dtype, part.data_ptr(), {1, piece.numel, filled}, hops.own(piece));
    if (filled > 0) {
      // What the second encoding loses of the result joins what this rank has left out of its own part of the sum.
      const at::Tensor mine = left_out.narrow(0, begin + piece.begin, filled);
      const at::Tensor result = decoded.narrow(0, begin + piece.begin, filled);
      kernels.decode(spec, hops.own(piece), {1, piece.numel, filled}, result.data_ptr());
      mine.add_(part.narrow(0, 0, filled).sub_(result), 1.0 / scale);
    }
    reducing.reset();
    hops.share(piece);
  }
  forget_what_is_not_finite(left_out);
  const bool same_type = flat.scalar_type() == decoded.scalar_type();
  for (const auto& piece : hops.pieces()) {
    decode_piece(kernels, spec, hops.gather(piece), rows, piece, same_type ? flat : decoded);
    if (same_type) continue;
    each_row(piece, [&](const at::Tensor&, int64_t first, int64_t length) {
      flat.narrow(0, first, length).copy_(decoded.narrow(0, first, length));
    });
  }
}

}  // namespace two_shot
}  // namespace gossamer
