// Adasum over the ranks of one communicator, point to point. The arithmetic of two vectors is in adasum/adasum.h.
// Blocking code without the GIL. Called by the batch runner, and by tests through gossamer._C.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace gossamer::named {

struct AdasumOptions {
  // Memory that the caller keeps between calls; allocated here, and freed if large.
  at::Tensor* scratch = nullptr;
  bool torch_ops = false;  // use torch's operations on the CPU too, for tests
};

// flat becomes the Adasum of the ranks' flat, in equal bits on all ranks. flat is contiguous, of one dimension, and of
// float16, bfloat16, float32 or float64. It holds vectors of `lengths` elements, one after the other; each is combined on
// its own. Every rank of the group, of any size, calls this with the same dtype and lengths.
//
// The vectors of 2^k ranks are combined in pairs: first those of ranks 0 and 1, of 2 and 3, ..., then the results of 0-1
// and 2-3, and so on. With n ranks, 2^k < n < 2^(k+1), rank 2^k + i first gives its vectors to rank i, which combines them
// with its own. A rank without data takes part with zeros, which change no value.
//
// On a CUDA device torch's operations compute on the current stream.
//
// Throws PythonError(config) for unsuitable tensors, before anything is sent, and PythonError(comm) if a message is lost.
void adasum(Communicator& comm, const at::Tensor& flat, const std::vector<int64_t>& lengths,
            const AdasumOptions& options = {});

}  // namespace gossamer::named
