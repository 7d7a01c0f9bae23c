// optim.h on a CUDA stream: the same arithmetic header, the same bits. One launch per call, whatever the number
// of segments up to the table's size (then one per table). Nothing synchronises with the host.
#pragma once

#include <cuda_runtime.h>

#include "optim/optim.h"

namespace gossamer::optim::cuda {

void adam(Dtype dtype, const Adam& adam, const Segment* segments, int64_t count, cudaStream_t stream);
void sgd(Dtype dtype, const Sgd& sgd, const Segment* segments, int64_t count, cudaStream_t stream);

}  // namespace gossamer::optim::cuda
