// The speed of a group's link: whether rows travel faster in pieces, and how much must be in flight. Measured on the first
// long rows of the group's own traffic, and decided once, equally on all ranks.
//
// On a slow link a whole row keeps a connection busy. Gloo's announcement of this rank's receive, which the other direction
// waits for, queues behind it: the two directions run one after the other, in twice the time. And where several ranks send
// to one at the same time, the links of the other ranks are idle. So long rows go in pieces of a few milliseconds. On a
// fast link pieces would cost more than they save.
#pragma once

#include <cstdint>
#include <limits>

#include "comm/communicator.h"

namespace gossamer {

class Pace {
 public:
  static constexpr int64_t kMostPieces = 32;

  // A hop with rows of `row_bytes` took `seconds`. All ranks report the same hops.
  void measured(Communicator& comm, int64_t row_bytes, double seconds);
  // Collective; called before rows of `row_bytes` travel.
  void decide(Communicator& comm, int64_t row_bytes);

  int64_t piece_bytes() const { return piece_bytes_; }  // 0: whole
  // The least number of bytes in flight: what the link carries from the announcement of a receive until its data comes.
  int64_t flight_bytes() const { return flight_bytes_; }

 private:
  bool is_judged(const Communicator& comm, int64_t row_bytes) const;

  int hops_ = 0;  // measured so far
  bool decided_ = false;
  double seconds_per_byte_ = std::numeric_limits<double>::infinity();  // the best of the measured hops
  int64_t piece_bytes_ = 0, flight_bytes_ = 0;
};

}  // namespace gossamer
