// What the ways of rows keep of a group from call to call: what its link is worth, and memory that its ranks read in each
// other. It lies with the communicator, which knows nothing of it.
#pragma once

#include "comm/communicator.h"
#include "route/pace.h"

namespace gossamer {

class Route {
 public:
  static Route& of(Communicator& comm);

  Pace& pace() { return pace_; }
  // Rows on every rank that all read in place: size() for what a rank sends to each, and behind them one for what it has
  // for all, always in the same place. Collective where it has to grow. For a communicator that shares memory.
  struct Shared {
    PeerBlock* block = nullptr;
    int64_t row_bytes = 0;
    at::Tensor memory;
  };
  Shared& shared(Communicator& comm, int64_t row_bytes);

 private:
  Pace pace_;
  Shared shared_;
};

}  // namespace gossamer
