// See pace.h.
#include "route/pace.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace gossamer {
namespace {

constexpr int64_t kLongRow = int64_t{64} << 10;  // bytes
constexpr int64_t kLeastPiece = int64_t{32} << 10, kLargestPiece = int64_t{256} << 10;
constexpr double kPieceSeconds = 3e-3;  // time of a piece on a slow link
constexpr int kTrials = 3;              // hops with long rows that are measured
constexpr int kSmallRings = 8;          // for the latency
constexpr double kSmallRingsSeconds = 0.1;
constexpr double kFastBytesPerSecond = 3e8;  // from 2.4 Gbit/s on

// The largest of the ranks' values. Goes twice around a ring: so it takes as long as messages there and back, size() - 1
// times.
double largest(Communicator& comm, double own) {
  const auto sent = static_cast<int64_t>(comm.bytes_sent()),
             received = static_cast<int64_t>(comm.bytes_received());
  const int size = comm.size(), next = (comm.rank() + 1) % size, before = (comm.rank() + size - 1) % size;
  at::Tensor mine = at::full({1}, own, at::kDouble), theirs = at::zeros_like(mine);
  for (int hop = 0; hop < 2 * (size - 1); ++hop) {
    comm.exchange({{theirs, mine, next, before}})->wait();
    own = std::max(own, theirs.item<double>());
    std::swap(mine, theirs);
  }
  // This runs a number of times that depends on the clock; the byte counters must not.
  comm.count(sent - static_cast<int64_t>(comm.bytes_sent()),
             received - static_cast<int64_t>(comm.bytes_received()));
  return own;
}

}  // namespace

bool Pace::is_judged(const Communicator& comm, int64_t row_bytes) const {
  return !decided_ && comm.uses_sockets() && comm.size() > 1 && row_bytes > kLongRow;
}

void Pace::measured(Communicator& comm, int64_t row_bytes, double seconds) {
  if (!is_judged(comm, row_bytes) || hops_ == kTrials) return;
  ++hops_;
  const double bytes = static_cast<double>(row_bytes) * (comm.size() - 1);
  seconds_per_byte_ = std::min(seconds_per_byte_, seconds / bytes);
}

void Pace::decide(Communicator& comm, int64_t row_bytes) {
  if (!is_judged(comm, row_bytes) || hops_ < kTrials) return;
  decided_ = true;
  const double bytes_per_second = 1 / largest(comm, seconds_per_byte_);
  if (bytes_per_second >= kFastBytesPerSecond) return;
  piece_bytes_ =
      std::clamp(static_cast<int64_t>(bytes_per_second * kPieceSeconds), kLeastPiece, kLargestPiece);
  // All ranks are here now. Measures rings of small messages, one after the other; the best is one that no computation has
  // delayed. Each ring tells all ranks how long the one before took, so that all stop together if messages take long.
  double ring_seconds = std::numeric_limits<double>::infinity(), own = 0, spent = 0;
  for (int ring = 0; ring < kSmallRings && spent < kSmallRingsSeconds; ++ring) {
    const auto begun = std::chrono::steady_clock::now();
    spent += largest(comm, own);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begun;
    own = elapsed.count();
    ring_seconds = std::min(ring_seconds, own);
  }
  flight_bytes_ =
      static_cast<int64_t>(bytes_per_second * ring_seconds / (comm.size() - 1));  // there and back
}

}  // namespace gossamer
