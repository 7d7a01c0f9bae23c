// What the ways of rows keep of a group between calls: the speed of its link, and memory that its ranks read in each other.
// The communicator owns it and knows nothing of it.
#pragma once

#include <c10/core/Stream.h>

#include <optional>

#include "comm/communicator.h"
#include "route/pace.h"

namespace gossamer {

class Route {
 public:
  static Route& of(Communicator& comm);

  Pace& pace() { return pace_; }
  // Rows on every rank that all ranks read in place: size() rows for what a rank sends to each, then one for what it sends
  // to all, always in the same place. Collective if it has to grow. For a communicator that shares memory.
  struct Shared {
    PeerBlock* block = nullptr;
    int64_t row_bytes = 0;
    at::Tensor memory;
  };
  Shared& shared(Communicator& comm, int64_t row_bytes);
  // A stream of the communicator's device besides those on which its sums run.
  c10::Stream side_stream(const Communicator& comm);

 private:
  Pace pace_;
  Shared shared_;
  std::optional<c10::Stream> side_stream_;
};

}  // namespace gossamer
