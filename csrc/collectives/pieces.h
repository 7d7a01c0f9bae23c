// Encode and decode for one piece of a matrix whose rows travel in pieces. Used by the two-shots.
#pragma once

#include <algorithm>

#include "device_kernels.h"
#include "route/rows.h"
#include "route/scratch.h"

namespace gossamer {

// call(row, first, length) for the piece of each row: `length` of its elements exist, from element `first` of the matrix.
template <class Call>
void each_row(const codec::Rows& rows, const Piece& piece, const Call& call) {
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t first = std::min(rows.numel, row * rows.row_numel + piece.begin);
    const int64_t end = std::min(rows.numel, (row + 1) * rows.row_numel);
    call(row, first, std::clamp<int64_t>(end - first, 0, piece.numel));
  }
}

inline uint8_t* address_of(const at::Tensor& x, int64_t element) {
  return bytes_of(x) + element * static_cast<int64_t>(x.element_size());
}

// Memory for the sum of a row of `chunk` elements, which reduce_encode needs for some codecs; else null.
void* memory_for_sum(Scratch& scratch, const codec::Spec& spec, int64_t chunk, at::Device device);

void encode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const at::Tensor& x,
                  const codec::Rows& rows, const Piece& piece, uint8_t* wire);
void decode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const codec::WireRows& wire,
                  const codec::Rows& rows, const Piece& piece, const at::Tensor& out);

}  // namespace gossamer
