// See pieces.h.
#include "collectives/pieces.h"

#include "observe/recorder.h"

namespace gossamer {

void* memory_for_sum(Scratch& scratch, const codec::Spec& spec, int64_t chunk, at::Device device) {
  if (!codec::has_row_statistics(spec)) return nullptr;
  return scratch.sum(chunk * element_size(accumulate_dtype(spec.dtype)), device).data_ptr();
}

void encode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const at::Tensor& x,
                  const codec::Rows& rows, const Piece& piece, uint8_t* wire) {
  const observe::Span span("encode", "codec", rows.rows * piece.row_bytes);
  if (piece.numel == rows.row_numel) return kernels.encode(spec, spec.dtype, x.data_ptr(), rows, wire);
  each_row(rows, piece, [&](int64_t row, int64_t first, int64_t length) {
    kernels.encode(spec, spec.dtype, address_of(x, first), {1, piece.numel, length},
                   wire + row * piece.row_bytes);
  });
}

void decode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const codec::WireRows& wire,
                  const codec::Rows& rows, const Piece& piece, const at::Tensor& out) {
  const observe::Span span("decode", "codec", rows.rows * piece.row_bytes);
  if (piece.numel == rows.row_numel) return kernels.decode(spec, wire, rows, out.data_ptr());
  each_row(rows, piece, [&](int64_t row, int64_t first, int64_t length) {
    kernels.decode(spec, wire.row(row, piece.row_bytes), {1, piece.numel, length}, address_of(out, first));
  });
}

}  // namespace gossamer
