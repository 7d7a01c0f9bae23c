// See pieces.h.
#include "collectives/pieces.h"

#include <algorithm>

#include "observe/recorder.h"

namespace gossamer {
namespace {

int64_t valid_of(const codec::Rows& rows, int64_t row, const Piece& piece) {
  return std::clamp<int64_t>(rows.numel - row * rows.row_numel - piece.begin, 0, piece.numel);
}

int64_t byte_of(const at::Tensor& x, const codec::Rows& rows, int64_t row, const Piece& piece) {
  const int64_t element = std::min(rows.numel, row * rows.row_numel + piece.begin);
  return element * static_cast<int64_t>(x.element_size());
}

}  // namespace

void encode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const at::Tensor& x,
                  const codec::Rows& rows, const Piece& piece, uint8_t* wire) {
  const observe::Span span("encode", "codec", rows.rows * piece.row_bytes);
  if (piece.numel == rows.row_numel) return kernels.encode(spec, spec.dtype, x.data_ptr(), rows, wire);
  for (int64_t row = 0; row < rows.rows; ++row) {
    const codec::Rows one{1, piece.numel, valid_of(rows, row, piece)};
    const uint8_t* values = bytes_of(x) + byte_of(x, rows, row, piece);
    kernels.encode(spec, spec.dtype, values, one, wire + row * piece.row_bytes);
  }
}

void decode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const codec::WireRows& wire,
                  const codec::Rows& rows, const Piece& piece, const at::Tensor& out) {
  const observe::Span span("decode", "codec", rows.rows * piece.row_bytes);
  if (piece.numel == rows.row_numel) return kernels.decode(spec, wire, rows, out.data_ptr());
  for (int64_t row = 0; row < rows.rows; ++row) {
    const codec::Rows one{1, piece.numel, valid_of(rows, row, piece)};
    uint8_t* values = bytes_of(out) + byte_of(out, rows, row, piece);
    kernels.decode(spec, wire.row(row, piece.row_bytes), one, values);
  }
}

}  // namespace gossamer
