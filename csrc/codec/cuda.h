// codec.h on a CUDA stream: the same functions, the same arithmetic headers, the same bytes. Every call is one kernel
// launch, or three where statistics span a row of more than 8192 elements (minmax_u8), or none for empty input. Wire
// memory is 16-byte aligned. At most kMaxEach rows may have addresses of their own: the addresses travel as an argument
// of the kernel. Nothing synchronises with the host.
#pragma once

#include <cuda_runtime.h>

#include "codec/codec.h"

namespace gossamer::codec::cuda {

constexpr int kMaxEach = 72;  // the most ranks that torch's symmetric memory takes

void encode(const Spec& spec, Dtype source, const void* x, const Rows& rows, uint8_t* wire,
            cudaStream_t stream);
void decode(const Spec& spec, const WireRows& wire, const Rows& rows, void* out, cudaStream_t stream);
void decode_add(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
                void* acc, cudaStream_t stream);
void reduce_encode(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
                   double scale, uint8_t* out, void* scratch, cudaStream_t stream);
void encode_with_error(const Spec& spec, Dtype source, const void* x, void* error, const Rows& rows,
                       uint8_t* wire, cudaStream_t stream);
void reduce_encode_with_error(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                              int64_t valid, double scale, uint8_t* out, void* scratch, void* error,
                              cudaStream_t stream);

}  // namespace gossamer::codec::cuda
