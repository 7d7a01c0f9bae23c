// A sum in two levels: the ranks of a host add up what they have, each part by the rank that carries it; the carriers sum
// their part from host to host; and every rank of the host gets all parts. All network cards work, and a codec is used
// on the way across only. What the carriers do there is the caller's: a two-shot, or a codec in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "comm/by_hosts.h"

namespace gossamer {

// What is done to a tensor while other parts of it are on their way. Each is called for parts that together are all of it:
// elements [begin, begin + numel) of every chunk, of a short last chunk as far as the tensor goes.
struct Around {
  using Part = std::function<void(int64_t chunk, int64_t begin, int64_t numel)>;
  Part before;  // it is sent: fills it
  Part after;   // it holds the result
};

// part (contiguous, not empty) becomes scale * its sum over the hosts; `error` is that of part, if any.
using Across = std::function<void(Communicator& across, const at::Tensor& part, double scale,
                                  const at::Tensor& error, const Around& around)>;

// x (contiguous floats, any size) becomes scale * its sum over all ranks, in place. Parts are whole blocks of `block`
// elements. `error`: undefined, or as many elements as x has, of which the carrier's own part counts. Memory of
// comm.allocate() is summed where it is. Inside a host sums are in rank order, in float32 (float64 for float64), and rounded
// to x's dtype.
void sum_by_hosts(ByHosts& comm, const at::Tensor& x, double scale, int64_t block, const at::Tensor& error,
                  const Across& across);

}  // namespace gossamer
