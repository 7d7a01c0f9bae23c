// ChunkTopK: of every chunk of a row the few elements of largest magnitude, with short indices and two bits a value.
// Called by ops_sparse.cpp and the C++ tests. It is apart
// from codec/, whose drivers give every element a code of its own.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace gossamer::sparse {

constexpr int64_t kMaxChunk = 16384, kMaxKept = 1024;

struct Format {
  int64_t chunk;  // elements, a multiple of 32, at most kMaxChunk
  int64_t kept;   // elements of a chunk that are sent, at most kMaxKept and `chunk`
};

// Wire bytes of a row: an entry for each chunk, the last one too, which may be short. The only place where a Format is
// checked.
int64_t row_bytes(const Format& format, int64_t row_numel);

struct Kernels {
  const char* name;  // "scalar", "neon", "avx2", "avx512"

  // x[rows * row_numel], float32 -> wire[rows * row_bytes].
  void (*encode)(const Format& format, const float* x, int64_t rows, int64_t row_numel, uint8_t* wire);

  // acc[row_numel] (dtype f32 or f64) += the rows of `wire`, in row order. Nothing dense is made of a row. Indices outside
  // a chunk end its entry, so wrong bytes write nowhere else.
  void (*decode_add)(const Format& format, const uint8_t* wire, int64_t rows, int64_t row_numel, Dtype dtype,
                     void* acc);
};

// The same on a device: on a stream, a cudaStream_t. One launch a call, none for empty input. Device memory of any alignment.
struct DeviceKernels {
  void (*encode)(const Format& format, const float* x, int64_t rows, int64_t row_numel, uint8_t* wire,
                 void* stream);
  void (*decode_add)(const Format& format, const uint8_t* wire, int64_t rows, int64_t row_numel, Dtype dtype,
                     void* acc, void* stream);
};
// CUDA's, which sparse_cuda.cu puts here when its library is loaded; null in a build without CUDA.
const DeviceKernels*& cuda_kernels();

const Kernels& kernels();
bool select_kernels(const char* name);
const Kernels* kernels_by_name(const char* name);  // nullptr if this CPU or build lacks them

}  // namespace gossamer::sparse
