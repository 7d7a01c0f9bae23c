// Rows in pieces, sent in turns; see rows.h. A rank sends one piece after another. In the first hop it sends the pieces for
// the next rank, then those for the rank after it, and so on. In the second hop, a ring, it sends its own pieces, then those
// that came from the rank before. If all ranks sent to all at once, several would send to one, and the other links would be
// idle. Turns help two ranks too, because Gloo's collectives announce their receives late; see Communicator::exchange.
#include <algorithm>
#include <deque>

#include "route/route.h"
#include "route/rows.h"

namespace gossamer {
namespace {

constexpr int64_t kRowsInFlight = 4;  // besides what the link itself holds; with more, ranks get out of step
constexpr int64_t kAlignment = 64;    // bytes, of a part of a row that is encoded whole

class RowsInTurns : public Rows {
 public:
  RowsInTurns(Communicator& comm, Scratch& scratch, const Shape& shape, const Pace& pace)
      : Rows(comm, shape, pace.piece_bytes()), in_place_(shape.whole.defined()) {
    const int64_t bytes = pieces_.back().offset + comm.size() * pieces_.back().row_bytes;
    sending_ = in_place_ ? shape.whole : scratch.send(bytes, shape.device);
    if (shape.hops != Hops::second) receiving_ = scratch.receive(bytes, shape.device);
    cut(pace.piece_bytes());
    const int64_t part = parts_.front().bytes;
    in_flight_ = static_cast<size_t>(kRowsInFlight + (pace.flight_bytes() + part - 1) / part);
    if (shape.hops == Hops::second) sent_ = arrived_ = hop_items();
  }

  uint8_t* send(const Piece& piece) override { return bytes_of(sending_) + piece.offset; }
  uint8_t* own(const Piece& piece) override {
    return bytes_of(sending_) + sent_at(piece, comm_.rank());  // free after the first hop
  }
  bool in_place() const override { return in_place_; }

  void post(const Piece& piece) override {
    const int rank = comm_.rank();
    receiving_.narrow(0, piece.offset + rank * piece.row_bytes, piece.row_bytes)
        .copy_(sending_.narrow(0, sent_at(piece, rank), piece.row_bytes));
    posted_ = last_part(piece) + 1;
    send_next();
  }

  codec::WireRows swap(const Piece& piece) override {
    wait_for(piece, hop_items());
    return bytes_of(receiving_) + piece.offset;
  }

  void share(const Piece& piece) override {
    shared_ = last_part(piece) + 1;
    send_next();
  }

  codec::WireRows gather(const Piece& piece) override {
    wait_for(piece, 2 * hop_items());
    return send(piece);
  }

 private:
  struct Part {  // the part of every row of a piece that one operation moves
    size_t piece;
    int64_t begin, bytes;
  };

  // A row that is encoded as one piece is cut only on the wire.
  void cut(int64_t piece_bytes) {
    const bool one = pieces_.size() == 1;
    const int64_t row = pieces_[0].row_bytes;
    const int64_t length = std::max(piece_bytes, row / Pace::kMostPieces) / kAlignment * kAlignment;
    for (size_t piece = 0; piece < pieces_.size(); ++piece) {
      const int64_t bytes = pieces_[piece].row_bytes, step = one ? length : bytes;
      for (int64_t begin = 0; begin < bytes; begin += step)
        parts_.push_back({piece, begin, std::min(step, bytes - begin)});
    }
  }

  size_t last_part(const Piece& piece) const {
    return pieces_.size() == 1 ? parts_.size() - 1 : number(piece);
  }
  size_t hop_items() const { return parts_.size() * static_cast<size_t>(comm_.size() - 1); }

  // The caller's matrix has whole rows one after the other; scratch memory has the rows of each piece together.
  int64_t sent_at(const Piece& piece, int row) const {
    if (!in_place_) return piece.offset + row * piece.row_bytes;
    return (row * sending_.numel() + piece.offset) / comm_.size();
  }
  at::Tensor sent(const Part& part, int row) const {
    return sending_.narrow(0, sent_at(pieces_[part.piece], row) + part.begin, part.bytes);
  }
  at::Tensor received(const Part& part, int row) const {
    const Piece& piece = pieces_[part.piece];
    return receiving_.narrow(0, piece.offset + row * piece.row_bytes + part.begin, part.bytes);
  }

  bool may_send(size_t item) const {
    const size_t count = parts_.size(), part = item % count;
    if (item < hop_items()) return part < posted_;
    if (item < hop_items() + count) return part < shared_;
    return item - count < arrived_;  // what a rank passes on arrived one turn before
  }

  void send_next() {
    const size_t count = parts_.size();
    const int size = comm_.size(), rank = comm_.rank();
    while (flying_.size() < in_flight_ && sent_ < 2 * hop_items() && may_send(sent_)) {
      const Part& part = parts_[sent_ % count];
      const bool first = sent_ < hop_items();
      const int turn = 1 + static_cast<int>(sent_ % hop_items() / count);
      const int apart = first ? turn : 1;
      const int to = (rank + apart) % size, from = (rank + size - apart) % size;
      const int comes = (rank + size - turn) % size, goes = first ? to : (comes + 1) % size;
      const at::Tensor into = first ? received(part, comes) : sent(part, comes);
      flying_.push_back(comm_.exchange({{into, sent(part, goes), to, from}}));
      ++sent_;
    }
  }

  // Waits until the last turn of a hop, which ends after `items`, has brought this piece.
  void wait_for(const Piece& piece, size_t items) {
    while (arrived_ <= items - parts_.size() + last_part(piece)) {
      flying_.front()->wait();
      flying_.pop_front();
      ++arrived_;
      send_next();
    }
  }

  bool in_place_;
  at::Tensor sending_, receiving_;
  std::vector<Part> parts_;
  size_t posted_ = 0, shared_ = 0;  // parts
  // Items of both hops in sending order; an item is a part for a rank.
  size_t sent_ = 0, arrived_ = 0;
  size_t in_flight_ = 0;  // items at most
  std::deque<PendingPtr> flying_;
};

}  // namespace

RowsPtr rows_in_turns(Communicator& comm, Scratch& scratch, const Shape& shape) {
  return std::make_unique<RowsInTurns>(comm, scratch, shape, Route::of(comm).pace());
}

}  // namespace gossamer
