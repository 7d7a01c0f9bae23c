// What the CUDA launches of codec/, flat/ and optim/ share. Included by their .cu files only.
#pragma once

#include <cuda_runtime.h>

#include "base/check.h"
#include "base/host_device.h"

namespace gossamer::GOSSAMER_ISA {

// Throws if the launch just before has failed.
inline void check_launch(const char* where, ErrorKind kind) {
  const cudaError_t status = cudaGetLastError();
  GOSSAMER_CHECK(status == cudaSuccess, kind, where, ": the kernel must launch, got ",
                 cudaGetErrorString(status));
}

// The segment that a chunk belongs to, where segment s begins with chunk first_chunk[s] and may be empty.
__device__ __forceinline__ int segment_of(const int* first_chunk, int count, int chunk) {
  int segment = 0;  // the last one that starts at or before this chunk
  for (int high = count; high - segment > 1;) {
    const int middle = (segment + high) / 2;
    (first_chunk[middle] <= chunk ? segment : high) = middle;
  }
  return segment;
}

}  // namespace gossamer::GOSSAMER_ISA
