// Rows in memory that all ranks read in each other, and route/peers.h. The ranks meet twice a call. What a rank reads or
// writes in another's memory, it reads or writes between two meetings, and between two meetings no element is touched by two
// ranks. The first meeting also keeps a rank from overwriting its own row while another still reads the row of the previous
// call, which is in the same place.
#include "route/peers.h"

#include <ATen/DeviceGuard.h>

#include <algorithm>

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

class RowsOfPeers : public Rows {
 public:
  RowsOfPeers(Communicator& comm, const Shape& shape)
      : Rows(comm, shape, 0), shared_(Route::of(comm).shared(comm, pieces_[0].row_bytes)) {
    const int64_t moved = 2 * (comm.size() - 1) * pieces_[0].row_bytes;
    comm.count(moved, moved);
  }

  uint8_t* send(const Piece&) override { return base(); }
  void post(const Piece&) override {}
  codec::WireRows swap(const Piece& piece) override {
    meet(*shared_.block);
    return rows_at(comm_.rank() * piece.row_bytes);
  }
  uint8_t* own(const Piece&) override { return base() + for_all(); }
  void share(const Piece&) override {}
  codec::WireRows gather(const Piece&) override {
    meet(*shared_.block);
    return rows_at(for_all());
  }

 private:
  uint8_t* base() const { return shared_.block->bases().at(static_cast<size_t>(comm_.rank())); }
  int64_t for_all() const { return comm_.size() * shared_.row_bytes; }
  codec::WireRows rows_at(int64_t offset) {
    rows_.clear();
    for (const uint8_t* base : shared_.block->bases()) rows_.push_back(base + offset);
    return codec::WireRows(rows_.data());
  }

  Route::Shared& shared_;
  std::vector<const uint8_t*> rows_;
};

void meet_in_time(PeerBlock& block) {
  try {
    block.meet();
  } catch (const std::exception& error) {
    const auto rank = block.missing();
    if (!rank) throw;
    raise_python(ErrorKind::comm, "meet: rank ", *rank, " did not come in time: ", first_line(error.what()));
  }
}

}  // namespace

RowsPtr rows_of_peers(Communicator& comm, const Shape& shape) {
  return std::make_unique<RowsOfPeers>(comm, shape);
}

void meet(PeerBlock& block) {
  observe::Flight flight("meet", 0);
  meet_in_time(block);
  flight.posted();
}

// Only rank j reads and writes chunk j, in every rank's memory.
bool sum_in_place(Communicator& comm, const at::Tensor& x, double scale) {
  const auto dtype = float_dtype(x.scalar_type());
  if (!dtype || !x.is_contiguous()) return false;
  PeerBlock* block = comm.peers_of(x);
  if (block == nullptr) return false;
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
  flight.posted();
  comm.count(moved, moved);
  return true;
}

}  // namespace gossamer
