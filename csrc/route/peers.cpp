// Rows in memory that all ranks read in each other, and route/peers.h. The ranks meet twice a call. What a rank reads or
// writes in another's memory, it reads or writes between two meetings, and between two meetings no element is touched by two
// ranks. The first meeting also keeps a rank from overwriting its own row while another still reads the row of the previous
// call, which is in the same place.
//
// Memory of the host is written and read over PCIe, which moves bytes both ways at once. So large rows go in pieces there. A
// second stream writes them and meets the other ranks after each, while the caller's stream reads the pieces before.
#include "route/peers.h"

#include <ATen/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <deque>

#include "backend/peers.h"
#include "device_kernels.h"
#include "errors.h"
#include "float_dtype.h"
#include "observe/recorder.h"
#include "route/route.h"
#include "route/rows.h"

namespace gossamer {
namespace {

constexpr int64_t kAlignmentBytes = 16;  // of a rank's part, so that kernels move whole vectors
constexpr int kMain = 0, kSide = 1;      // channels of meetings
constexpr auto kStopped = "the device has stopped";

// A piece of all rows has a MiB at least. At 22 GB/s that takes 48 us, many times as long as its launches and its meeting.
constexpr int64_t kLeastBytes = int64_t{1} << 20, kMostPieces = 8;

// Of each row in a piece; 0 for one piece.
int64_t piece_bytes(const Communicator& comm, const Shape& shape) {
  if (!comm.sums_by_rows() || comm.device().is_cpu()) return 0;
  const int64_t row = codec::row_bytes(shape.spec, shape.chunk);
  return std::max(kLeastBytes / comm.size(), (row + kMostPieces - 1) / kMostPieces);
}

// A device that has waited for a rank in vain has stopped: every later call to it fails, and does not say why.
void check_none_missing(const PeerBlock& block, const std::string& why) {
  if (const auto rank = block.missing())
    raise_python(ErrorKind::comm, "meet: rank ", *rank, " did not come in time: ", why);
}

class RowsOfPeers : public Rows {
 public:
  RowsOfPeers(Communicator& comm, const Shape& shape)
      : Rows(comm, shape, piece_bytes(comm, shape)), shared_(Route::of(comm).shared(comm, row_bytes())) {
    check_none_missing(*shared_.block, kStopped);
    if (pieces_.size() > 1) side_ = Route::of(comm).side_stream(comm);
    const int64_t moved = 2 * (comm.size() - 1) * row_bytes();
    comm.count(moved, moved);
  }

  // Until post(), the current stream is the side stream. It begins after what the caller has queued.
  uint8_t* send(const Piece& piece) override {
    if (side_) {
      c10::Event ready(side_->device_type());
      ready.record(current_stream());
      ready.block(*side_);
      on_side_.reset_stream(*side_);
    }
    return base() + piece.offset;
  }
  void post(const Piece&) override {
    if (!side_) return;
    meet(*shared_.block, kSide);
    arrived_.emplace_back(side_->device_type()).record(*side_);
    on_side_.reset();
  }
  codec::WireRows swap(const Piece& piece) override {
    side_ ? arrived_[number(piece)].block(current_stream()) : meet(*shared_.block, kMain);
    return rows_at(piece.offset + comm_.rank() * piece.row_bytes);
  }
  uint8_t* own(const Piece& piece) override { return base() + for_all(piece); }
  void share(const Piece&) override {}
  codec::WireRows gather(const Piece& piece) override {
    if (number(piece) == 0) {  // after the caller has shared all pieces
      meet(*shared_.block, kMain);
      comm_.wait_for_device();
    }
    return rows_at(for_all(piece));
  }

 private:
  int64_t row_bytes() const { return pieces_.back().offset / comm_.size() + pieces_.back().row_bytes; }
  c10::Stream current_stream() const {
    return c10::impl::VirtualGuardImpl(side_->device_type()).getStream(side_->device());
  }
  uint8_t* base() const { return shared_.block->bases().at(static_cast<size_t>(comm_.rank())); }
  int64_t for_all(const Piece& piece) const {
    return comm_.size() * shared_.row_bytes + piece.offset / comm_.size();
  }
  codec::WireRows rows_at(int64_t offset) {
    rows_.clear();
    for (const uint8_t* base : shared_.block->bases()) rows_.push_back(base + offset);
    return codec::WireRows(rows_.data());
  }

  Route::Shared& shared_;
  std::vector<const uint8_t*> rows_;
  std::optional<c10::Stream> side_;  // if there are pieces
  c10::OptionalStreamGuard on_side_;
  std::deque<c10::Event> arrived_;  // of all ranks, by piece
};

void meet_in_time(PeerBlock& block, int channel = kMain) {
  try {
    block.meet(channel);
  } catch (const std::exception& error) {
    check_none_missing(block, first_line(error.what()));
    throw;
  }
}

}  // namespace

RowsPtr rows_of_peers(Communicator& comm, const Shape& shape) {
  return std::make_unique<RowsOfPeers>(comm, shape);
}

void meet(PeerBlock& block, int channel) {
  observe::Flight flight("meet", 0);
  meet_in_time(block, channel);
  flight.posted();
}

// Only rank j reads and writes chunk j, in every rank's memory.
bool sum_in_place(Communicator& comm, const at::Tensor& x, double scale) {
  const auto dtype = float_dtype(x.scalar_type());
  if (!dtype || !x.is_contiguous()) return false;
  PeerBlock* block = comm.peers_of(x);
  if (block == nullptr) return false;
  check_none_missing(*block, kStopped);
  const c10::OptionalDeviceGuard guard(comm.device());
  const int64_t n = comm.size();
  const int64_t element_bytes = element_size(*dtype);
  const int64_t unit = kAlignmentBytes / element_bytes;
  const int64_t chunk = ((x.numel() + n - 1) / n + unit - 1) / unit * unit;
  const int64_t begin = std::min(comm.rank() * chunk, x.numel());
  const int64_t valid = std::min(chunk, x.numel() - begin);
  const int64_t offset = static_cast<uint8_t*>(x.data_ptr()) -
                         block->bases().at(static_cast<size_t>(comm.rank())) + begin * element_bytes;
  std::vector<void*> rows;  // also the outs
  for (uint8_t* base : block->bases()) rows.push_back(base + offset);

  const int64_t moved = 2 * static_cast<int64_t>(x.nbytes()) * (n - 1) / n;
  observe::Flight flight("sum_in_place", moved);
  meet_in_time(*block);
  device_kernels(comm.device().type())
      .sum_rows(*dtype, {rows.data(), n, rows.data(), n, valid, comm.rank()}, scale);
  meet_in_time(*block);
  comm.wait_for_device();
  flight.posted();
  comm.count(moved, moved);
  return true;
}

}  // namespace gossamer
