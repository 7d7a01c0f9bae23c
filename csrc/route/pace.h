// What a group's link is worth: whether rows travel sooner in pieces, and how much must be under way. Measured by the first
// long rows of the group's own traffic, and decided once, on all ranks alike.
//
// On a slow link a whole row keeps a connection busy, and behind it stands Gloo's word that this rank receives, which the
// other direction waits for: one after the other is sent, in twice the time. And where several ranks send to one at the same
// moment, the links of the others have nothing to do. So long rows go in pieces of some milliseconds; on a fast link that
// would cost more than it saves.
#pragma once

#include <cstdint>
#include <limits>

#include "comm/communicator.h"

namespace gossamer {

class Pace {
 public:
  static constexpr int64_t kMostPieces = 32;

  // A hop with such rows has taken so long. All ranks come here for the same hops.
  void measured(Communicator& comm, int64_t row_bytes, double seconds);
  // Collective, before such rows travel.
  void decide(Communicator& comm, int64_t row_bytes);

  int64_t piece_bytes() const { return piece_bytes_; }  // 0: whole
  // What a link takes between a rank's word that it receives and what comes of it: as much must be under way at least.
  int64_t flight_bytes() const { return flight_bytes_; }

 private:
  bool is_judged(const Communicator& comm, int64_t row_bytes) const;

  int hops_ = 0;  // that were measured
  bool decided_ = false;
  double seconds_per_byte_ = std::numeric_limits<double>::infinity();  // the best of those
  int64_t piece_bytes_ = 0, flight_bytes_ = 0;
};

}  // namespace gossamer
