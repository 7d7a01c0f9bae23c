// See hops.h. Through peers' memory the ranks meet twice a call. The first meeting is also what keeps a rank from writing
// its own row anew while another still reads that of the call before; it lies where it lay then.
#include "collectives/hops.h"

#include <algorithm>

#include "backend/peers.h"
#include "observe/recorder.h"

namespace gossamer {
namespace {

constexpr int64_t kMostPieces = 32;
constexpr int64_t kRowsInFlight = 4;  // beside what the link itself holds; with more, ranks get out of step
constexpr int64_t kLeastBlock = 64;   // elements; a row's begin on the wire is aligned anyway

std::vector<Hops::Piece> cut(const codec::Spec& spec, int64_t chunk, int64_t ranks, int64_t piece_bytes) {
  const int64_t row_bytes = codec::row_bytes(spec, chunk);
  int64_t numel = chunk;
  if (piece_bytes > 0 && row_bytes > piece_bytes) {
    const int64_t count = std::min(kMostPieces, (row_bytes + piece_bytes - 1) / piece_bytes);
    const int64_t block = spec.block * ((kLeastBlock + spec.block - 1) / spec.block);
    numel = (chunk + count * block - 1) / (count * block) * block;
  }
  std::vector<Hops::Piece> pieces;
  int64_t offset = 0;
  for (int64_t begin = 0; begin < chunk; begin += numel) {
    const int64_t length = std::min(numel, chunk - begin);
    pieces.push_back({begin, length, codec::row_bytes(spec, length), offset});
    offset += ranks * pieces.back().row_bytes;
  }
  return pieces;
}

int64_t valid_of(const codec::Rows& rows, int64_t row, const Hops::Piece& piece) {
  return std::clamp<int64_t>(rows.numel - row * rows.row_numel - piece.begin, 0, piece.numel);
}

int64_t byte_of(const at::Tensor& x, const codec::Rows& rows, int64_t row, const Hops::Piece& piece) {
  const int64_t element = std::min(rows.numel, row * rows.row_numel + piece.begin);
  return element * static_cast<int64_t>(x.element_size());
}

}  // namespace

Hops::Hops(Communicator& comm, Scratch& scratch, at::Device device, const CodecChoice& codec,
           const codec::Spec& spec, int64_t chunk, const at::Tensor& whole)
    : comm_(comm), peers_(comm.peer_rows(codec::row_bytes(spec, chunk))) {
  // Statistics of a row are of all of it, and random numbers go by an element's place in it.
  const bool divisible = !codec::has_row_statistics(spec) && !codec.stochastic;
  const bool one = peers_.block != nullptr || !divisible;
  pieces_ = cut(spec, chunk, comm.size(), one ? 0 : comm.piece_bytes());
  pending_.resize(pieces_.size());
  const int64_t row = std::max<int64_t>(1, pieces_.front().row_bytes);
  in_flight_ = static_cast<size_t>(kRowsInFlight + (comm.flight_bytes() + row - 1) / row);
  if (peers_.block != nullptr) {
    send_ = peers_.block->bases().at(static_cast<size_t>(comm.rank()));
    own_ = send_ + peers_.for_all;
    return;
  }
  const int64_t bytes = pieces_.back().offset + comm.size() * pieces_.back().row_bytes;
  in_place_ = whole.defined();
  sending_ = in_place_ ? whole : scratch.send(bytes, device);
  receiving_ = scratch.receive(bytes, device);
  send_ = bytes_of(sending_);
}

PendingPtr& Hops::pending(const Piece& piece) { return pending_.at(number(piece)); }

at::Tensor Hops::rows_of(const at::Tensor& memory, const Piece& piece) const {
  return memory.narrow(0, piece.offset, comm_.size() * piece.row_bytes);
}

at::Tensor Hops::received(const Piece& piece, int row) const {
  return receiving_.narrow(0, piece.offset + row * piece.row_bytes, piece.row_bytes);
}

// A matrix of the caller's has its rows behind each other, scratch memory its pieces.
int64_t Hops::sent_at(const Piece& piece, int row) const {
  if (!in_place_) return piece.offset + row * piece.row_bytes;
  return (row * sending_.numel() + piece.offset) / comm_.size();
}

at::Tensor Hops::sent(const Piece& piece, int row) const {
  return sending_.narrow(0, sent_at(piece, row), piece.row_bytes);
}

codec::WireRows Hops::rows_at(int64_t offset) {
  rows_.clear();
  for (const uint8_t* base : peers_.block->bases()) rows_.push_back(base + offset);
  return codec::WireRows(rows_.data());
}

void Hops::meet() {
  observe::Flight flight("meet", 0);
  peers_.block->meet();
  flight.posted();
}

// A rank sends one row after the other: in the first hop the rows for the next rank, of all pieces, then those for the
// one after it, and so on; in the second, along a ring, its own row, then what came from the rank before. Where all send
// to all at once, several send to one, and the links of the others have nothing to do. Between two ranks too, as Gloo's
// collectives tell late that this rank receives; see Communicator::exchange.
bool Hops::may_send(size_t item) const {
  const size_t count = pieces_.size(), piece = item % count;
  if (item < hop_items()) return piece < posted_;
  if (item < hop_items() + count) return piece < shared_;
  return item - count < arrived_;  // what is passed on has come a turn ago
}

void Hops::send_next() {
  const size_t count = pieces_.size();
  const int size = comm_.size(), rank = comm_.rank();
  while (flying_.size() < in_flight_ && sent_ < 2 * hop_items() && may_send(sent_)) {
    const Piece& piece = pieces_[sent_ % count];
    const bool first = sent_ < hop_items();
    const int turn = 1 + static_cast<int>(sent_ % hop_items() / count);
    const int apart = first ? turn : 1;
    const int to = (rank + apart) % size, from = (rank + size - apart) % size;
    const int comes = (rank + size - turn) % size, goes = first ? to : (comes + 1) % size;
    const at::Tensor into = first ? received(piece, comes) : sent(piece, comes);
    flying_.push_back(comm_.exchange({{into, sent(piece, goes), to, from}}));
    ++sent_;
  }
}

// Until this piece is here. In turns: until the last turn of a hop has brought it, the hop that ends after `items`.
void Hops::wait_for(const Piece& piece, size_t items) {
  if (!in_turns()) return pending(piece)->wait();
  while (arrived_ <= items - pieces_.size() + number(piece)) {
    flying_.front()->wait();
    flying_.pop_front();
    ++arrived_;
    send_next();
  }
}

void Hops::post(const Piece& piece) {
  if (peers_.block != nullptr) return;
  if (in_turns()) {
    received(piece, comm_.rank()).copy_(sent(piece, comm_.rank()));
    ++posted_;
    return send_next();
  }
  pending(piece) = comm_.all_to_all(rows_of(receiving_, piece), rows_of(sending_, piece));
}

codec::WireRows Hops::swap(const Piece& piece) {
  if (peers_.block != nullptr) {
    meet();
    return rows_at(comm_.rank() * piece.row_bytes);
  }
  wait_for(piece, hop_items());
  return bytes_of(receiving_) + piece.offset;
}

uint8_t* Hops::own(const Piece& piece) const {
  // After the all-to-all this rank's own row of what it sent is free.
  return own_ != nullptr ? own_ : send_ + sent_at(piece, comm_.rank());
}

void Hops::share(const Piece& piece) {
  if (peers_.block != nullptr) return;
  if (in_turns()) {
    ++shared_;
    return send_next();
  }
  const at::Tensor rows = rows_of(sending_, piece);
  pending(piece) = comm_.all_gather(rows, rows.narrow(0, comm_.rank() * piece.row_bytes, piece.row_bytes));
}

codec::WireRows Hops::gather(const Piece& piece) {
  if (peers_.block != nullptr) {
    meet();
    return rows_at(peers_.for_all);
  }
  wait_for(piece, 2 * hop_items());
  return send(piece);
}

void encode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const at::Tensor& x,
                  const codec::Rows& rows, const Hops::Piece& piece, uint8_t* wire) {
  const observe::Span span("encode", "codec", rows.rows * piece.row_bytes);
  if (piece.numel == rows.row_numel) return kernels.encode(spec, spec.dtype, x.data_ptr(), rows, wire);
  for (int64_t row = 0; row < rows.rows; ++row) {
    const codec::Rows one{1, piece.numel, valid_of(rows, row, piece)};
    const uint8_t* values = bytes_of(x) + byte_of(x, rows, row, piece);
    kernels.encode(spec, spec.dtype, values, one, wire + row * piece.row_bytes);
  }
}

void decode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const codec::WireRows& wire,
                  const codec::Rows& rows, const Hops::Piece& piece, const at::Tensor& out) {
  const observe::Span span("decode", "codec", rows.rows * piece.row_bytes);
  if (piece.numel == rows.row_numel) return kernels.decode(spec, wire, rows, out.data_ptr());
  for (int64_t row = 0; row < rows.rows; ++row) {
    const codec::Rows one{1, piece.numel, valid_of(rows, row, piece)};
    uint8_t* values = bytes_of(out) + byte_of(out, rows, row, piece);
    kernels.decode(spec, wire.row(row, piece.row_bytes), one, values);
  }
}

}  // namespace gossamer
