// What ranks do with memory that they read in each other: meet, and sum it in place.
#pragma once

#include "comm/communicator.h"

namespace gossamer {

// PeerBlock::meet, recorded in the counters and the trace.
void meet(PeerBlock& block, int channel = 0);

// x (contiguous floats) becomes scale * the sum over ranks, added in rank order from zero, in place. x must lie in memory
// that comm.allocate() made, at the same place on every rank. Returns false, and does nothing, if it does not.
bool sum_in_place(Communicator& comm, const at::Tensor& x, double scale);

}  // namespace gossamer
