// The two hops of a two-shot: rows to their owners, and each owner's row to everyone. Over the communicator's
// collectives, or in memory that all ranks read in place, where it has such. Used by the two-shots; for one call.
#pragma once

#include <vector>

#include "collectives/two_shot.h"

namespace gossamer {

class Hops {
 public:
  // `whole`: size() * row_bytes of the caller's own to send from and gather into, instead of scratch memory; only without
  // peer memory, see `in_place`.
  Hops(Communicator& comm, Scratch& scratch, at::Device device, int64_t row_bytes,
       const at::Tensor& whole = at::Tensor());

  // Row j is for rank j; to be filled before swap(), and untouched after it.
  uint8_t* send() const { return send_; }
  // Row `rank` of every rank's, in rank order.
  codec::WireRows swap();
  // The row for everyone; to be filled between swap() and gather().
  uint8_t* own() const { return own_; }
  // Every rank's own row, in rank order. It may be `whole`.
  codec::WireRows gather();
  bool in_place() const { return in_place_; }  // gather() leaves its rows in `whole`

 private:
  codec::WireRows rows_at(int64_t offset);

  Communicator& comm_;
  int64_t row_bytes_;
  PeerRows peers_;
  bool in_place_ = false;
  at::Tensor sending_, receiving_;  // without peer memory
  uint8_t *send_ = nullptr, *own_ = nullptr;
  std::vector<const uint8_t*> rows_;
};

}  // namespace gossamer
