// The two-shot all-reduce with error feedback: what a codec leaves out is added in the next call. See two_shot.h.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "collectives/pieces.h"
#include "collectives/two_shot.h"
#include "device_kernels.h"
#include "observe/recorder.h"

namespace gossamer {
namespace two_shot {
namespace {

// The values and the error of one call.
class Owed {
 public:
  Owed(const DeviceKernels& kernels, const at::Tensor& x, const at::Tensor& error, const codec::Rows& rows)
      : kernels_(kernels), flat_(x.view({rows.numel})), error_(error.view({rows.numel})), rows_(rows) {}

  // Encodes the piece of x plus its error into `wire`. The error is then what `wire` leaves out.
  void encode(const codec::Spec& spec, const Piece& piece, uint8_t* wire) {
    const observe::Span span("encode", "codec", rows_.rows * piece.row_bytes);
    const Dtype source = to_dtype(flat_.scalar_type(), "all_reduce");
    kernels_.encode_with_error(spec, source, address_of(flat_, piece.begin), address_of(error_, piece.begin),
                               part_of(rows_, piece), wire);
  }

  // Sums `received`, scales, and encodes the result for all ranks. This rank owns the result, elements [begin, begin +
  // filled) of x; what its encoding leaves out is added to this rank's error.
  void reduce(const codec::Spec& spec, const codec::WireRows& received, const Piece& piece, int64_t begin,
              int64_t filled, double scale, void* sum, uint8_t* out) {
    const observe::Span span("reduce", "codec", piece.row_bytes);
    kernels_.reduce_encode_with_error(spec, received, rows_.rows, piece.numel, filled, scale, out, sum,
                                      filled > 0 ? address_of(error_, begin) : nullptr);
  }

  void decode(const codec::Spec& spec, const codec::WireRows& wire, const Piece& piece) {
    if (flat_.scalar_type() == error_.scalar_type())
      return decode_piece(kernels_, spec, wire, rows_, piece, flat_);
    if (!decoded_.defined()) decoded_ = at::empty_like(error_);
    decode_piece(kernels_, spec, wire, rows_, piece, decoded_);
    if (piece.numel == rows_.row_numel) {
      flat_.copy_(decoded_);
      return;
    }
    for (int64_t first = piece.begin; first < rows_.numel; first += rows_.pitch) {
      const int64_t length = std::min(piece.numel, rows_.numel - first);
      flat_.narrow(0, first, length).copy_(decoded_.narrow(0, first, length));
    }
  }

 private:
  const DeviceKernels& kernels_;
  const at::Tensor flat_, error_;
  const codec::Rows rows_;
  at::Tensor decoded_;  // in error's type, where x has another
};

}  // namespace

void all_reduce_with_error(Communicator& comm, const CodecChoice& codec, at::Tensor x, double scale,
                           Scratch& scratch, uint64_t nonce, at::Tensor error, const Around& around) {
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  const auto& kernels = device_kernels(x.device().type());
  const int64_t n = comm.size();
  const int64_t numel = x.numel();
  if (numel == 0) return;
  auto spec = codec.spec(error.scalar_type());  // a wide type throughout: the error sees every rounding
  const int64_t chunk = chunk_numel(numel, comm.chunks(), spec.block);
  const auto call = [chunk](const Around::Part& part, int64_t begin, int64_t length) {
    if (part) part(chunk, begin, length);
  };
  if (ByHosts* hosts = comm.by_hosts()) {
    const auto across = [&](Communicator& level, const at::Tensor& part, double factor, const at::Tensor& own,
                            const Around& inner) {
      all_reduce_with_error(level, codec, part, factor, scratch, nonce, own, inner);
    };
    call(around.before, 0, chunk);
    sum_by_hosts(*hosts, x, scale, spec.block, error, across);
    return call(around.after, 0, chunk);
  }
  if (n == 1) {
    call(around.before, 0, chunk);
    x.view({numel}).add_(error.view({numel}));  // it is not zero if more ranks have saved it
    error.zero_();
    kernels.scale(to_dtype(x.scalar_type(), "all_reduce"), x.data_ptr(), numel, scale);
    return call(around.after, 0, chunk);
  }
  const int64_t begin = std::min(comm.rank() * chunk, numel);
  const int64_t valid = std::clamp<int64_t>(numel - begin, 0, chunk);
  const RowsPtr way = open_rows(comm, scratch, {spec, chunk, codec.is_divisible(), x.device()});
  Owed owed(kernels, x, error, {n, chunk, numel});

  spec.key = codec.key(nonce, Phase::first, comm.rank());
  for (const auto& piece : way->pieces()) {
    call(around.before, piece.begin, piece.numel);
    owed.encode(spec, piece, way->send(piece));
    way->post(piece);
  }

  void* sum = memory_for_sum(scratch, spec, chunk, x.device());
  spec.key = codec.key(nonce, Phase::reduced, comm.rank());
  for (const auto& piece : way->pieces()) {
    const codec::WireRows received = way->swap(piece);
    const int64_t filled = std::clamp<int64_t>(valid - piece.begin, 0, piece.numel);
    owed.reduce(spec, received, piece, begin + piece.begin, filled, scale, sum, way->own(piece));
    way->share(piece);
  }
  for (const auto& piece : way->pieces()) {
    owed.decode(spec, way->gather(piece), piece);
    call(around.after, piece.begin, piece.numel);
  }
}

}  // namespace two_shot
}  // namespace gossamer
