// Encode and decode for one piece of a matrix whose rows travel in pieces. Used by the two-shots.
#pragma once

#include "device_kernels.h"
#include "route/rows.h"
#include "route/scratch.h"

namespace gossamer {

// The piece of each row. Its first element is element piece.begin of the matrix.
inline codec::Rows part_of(const codec::Rows& rows, const Piece& piece) {
  return {rows.rows, piece.numel, rows.numel - piece.begin, rows.pitch};
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
