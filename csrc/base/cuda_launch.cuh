// What the CUDA launches of codec/, flat/ and optim/ share. Included by their .cu files only.
#pragma once

#include <cuda_runtime.h>

#include "base/check.h"
#include "base/host_device.h"

// The most thread blocks of a launch. Beyond it a block takes several pieces. Tests define a small one.
#ifndef GOSSAMER_MAX_GRID
#define GOSSAMER_MAX_GRID 16384
#endif

namespace gossamer::GOSSAMER_ISA {

// kernel<<<grid, threads, 0, stream>>>(arguments...) in the form that a host compiler can read too: the tests run the
// kernels on the host (tests/cpp/cuda/emulator).
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, unsigned threads, cudaStream_t stream,
            const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  (void)cudaLaunchKernelEx(&config, kernel, arguments...);  // check_launch reads how it went
}

// Throws if a launch just before has failed.
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
