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
  kernels.encode(spec, spec.dtype, address_of(x, piece.begin), part_of(rows, piece), wire);
}

void decode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const codec::WireRows& wire,
                  const codec::Rows& rows, const Piece& piece, const at::Tensor& out) {
  const observe::Span span("decode", "codec", rows.rows * piece.row_bytes);
  kernels.decode(spec, wire, part_of(rows, piece), address_of(out, piece.begin));
}

}  // namespace gossamer
