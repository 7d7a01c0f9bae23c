// What ranks do in memory that they read in each other: meet, and sum it where it is.
#pragma once

#include "comm/communicator.h"

namespace gossamer {

// PeerBlock::meet, in the counters and the trace.
void meet(PeerBlock& block);

// x, contiguous floats, becomes scale * the sum over ranks in rank order from zero, by reading it where it is: in memory that
// comm.allocate() made, the same part on every rank. False, and nothing has happened, where that is not so.
bool sum_in_place(Communicator& comm, const at::Tensor& x, double scale);

}  // namespace gossamer
