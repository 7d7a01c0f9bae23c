// A sum in two levels. The ranks of a host add up their tensors; each part is added by the rank that carries it. The
// carriers sum their part from host to host. Then every rank of the host gets all parts. So all network cards work, and a
// codec is used only between hosts. The caller supplies that step: a two-shot, or a codec in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "comm/by_hosts.h"

namespace gossamer {

// Work on a tensor while other parts of it travel. Each function is called for parts that together cover the tensor:
// elements [begin, begin + numel) of every chunk; in a short last chunk, as many of them as it has.
struct Around {
  using Part = std::function<void(int64_t chunk, int64_t begin, int64_t numel)>;
  Part before;  // called before the part is sent: fills it
  Part after;   // called when the part holds the result
};

// part (contiguous, not empty) becomes scale * its sum over the hosts. `error`: the error memory of part, if any.
using Across = std::function<void(Communicator& across, const at::Tensor& part, double scale,
                                  const at::Tensor& error, const Around& around)>;

// x (contiguous floats, any size) becomes scale * its sum over all ranks, in place. Parts are whole blocks of `block`
// elements. `error`: undefined, or as many elements as x; only the carrier's own part of it is used. Memory of
// comm.allocate() is summed in place. Inside a host sums are in rank order, in float32 (float64 for float64), and rounded
// to x's dtype.
void sum_by_hosts(ByHosts& comm, const at::Tensor& x, double scale, int64_t block, const at::Tensor& error,
                  const Across& across);

}  // namespace gossamer
