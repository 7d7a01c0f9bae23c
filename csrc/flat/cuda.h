// flat.h on a CUDA stream: one launch per call for up to 1024 segments, then one for every 1024. Nothing
// synchronises with the host.
#pragma once

#include <cuda_runtime.h>

#include "flat/flat.h"

namespace gossamer::flat::cuda {

void gather(Dtype dtype, const Segment* segments, int64_t count, void* flat, double scale,
            cudaStream_t stream);
void scatter(Dtype dtype, const Segment* segments, int64_t count, const void* flat, double scale,
             cudaStream_t stream);
void scale(Dtype dtype, void* flat, int64_t numel, double scale, cudaStream_t stream);
// At most kMaxRows rows and outs: their addresses travel as an argument of the kernel.
constexpr int kMaxRows = kMostRanks;
void sum_rows(Dtype dtype, const RowSum& sum, double scale, cudaStream_t stream);

// What the stream runs next begins once all that any rank queued before its meeting is done, and sees what it wrote. The
// host does not wait. The device waits for timeout_ms; then it writes `missing` and ends the CUDA context.
void meet(const Meeting& meeting, cudaStream_t stream);

// Lets kernels read and write `memory` of the host, and returns its address for kernels of the current device. The memory is
// page-aligned and not yet mapped. unmap_host() must come before the memory is freed, when no kernel uses it any more.
void* map_host(void* memory, int64_t bytes);
void unmap_host(void* memory);

}  // namespace gossamer::flat::cuda
