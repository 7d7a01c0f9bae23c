// Adasum over the ranks of one communicator, point to point. Not the arithmetic of two vectors, which is adasum/adasum.h.
// Blocking code without the GIL. Called by the batch runner, and by tests through gossamer._C.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace gossamer::named {

struct AdasumOptions {
  at::Tensor* scratch =
      nullptr;             // memory that the caller keeps between calls; made here, and freed where large
  bool torch_ops = false;  // compute by torch's operations on the CPU too: for tests
};

// flat, contiguous, of one dimension and of float16, bfloat16, float32 or float64, becomes the Adasum of what the ranks of
// the group have in it: in equal bits on all of them. It holds vectors of `lengths` elements, one after the other;
// each is combined on its own. Every rank of the group, any number, calls this with the same dtype and lengths.
//
// The vectors of 2^k ranks are combined in pairs: first those of ranks 0 and 1, 2 and 3, ..., then the results of 0-1 and
// 2-3, and so on. Of n ranks with 2^k < n < 2^(k+1), rank 2^k + i first gives its vectors to rank i, where they are combined.
// A rank without data takes part with zeros, which change no value.
//
// On a CUDA device torch's operations compute on the current stream.
//
// Throws PythonError(config) for other tensors, before anything is sent, and PythonError(comm) once a message is lost.
void adasum(Communicator& comm, const at::Tensor& flat, const std::vector<int64_t>& lengths,
            const AdasumOptions& options = {});

}  // namespace gossamer::named
