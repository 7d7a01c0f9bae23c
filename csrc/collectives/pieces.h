// Encode and decode for one piece of a matrix whose rows travel in pieces. Used by the two-shots.
#pragma once

#include "device_kernels.h"
#include "route/rows.h"

namespace gossamer {

void encode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const at::Tensor& x,
                  const codec::Rows& rows, const Piece& piece, uint8_t* wire);
void decode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const codec::WireRows& wire,
                  const codec::Rows& rows, const Piece& piece, const at::Tensor& out);

}  // namespace gossamer
