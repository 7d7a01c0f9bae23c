// The functions of cuda.h for tensors of one element type. Each cuda_<dtype>.cu compiles those of one type, for every
// codec, so that the compilers of the hundreds of kernels run beside each other. codec_cuda.cu chooses the type.
#pragma once

#include "codec/cuda.h"

namespace gossamer::codec::cuda {

template <class T>
struct Launches {
  static void encode(const Spec& spec, Dtype source, const void* x, const Rows& rows, uint8_t* wire,
                     cudaStream_t stream);
  static void decode(const Spec& spec, const WireRows& wire, const Rows& rows, void* out,
                     cudaStream_t stream);
  static void decode_add(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                         int64_t valid, void* acc, cudaStream_t stream);
  static void reduce_encode(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                            int64_t valid, double scale, uint8_t* out, void* scratch, cudaStream_t stream);
};

// The same for the types that hold an error, float and double.
template <class T>
struct LaunchesWithError {
  static void encode_with_error(const Spec& spec, Dtype source, const void* x, void* error, const Rows& rows,
                                uint8_t* wire, cudaStream_t stream);
  static void reduce_encode_with_error(const Spec& spec, const WireRows& wire, int64_t rows,
                                       int64_t row_numel, int64_t valid, double scale, uint8_t* out,
                                       void* scratch, void* error, cudaStream_t stream);
};

}  // namespace gossamer::codec::cuda
