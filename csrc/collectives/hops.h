// The two hops of a two-shot: rows to their owners, and each owner's row to everyone. Over the communicator's
// collectives, or in memory that all ranks read in place, where it has such. Used by the two-shots; for one call.
//
// Where the communicator asks for it, rows travel in pieces, so that the link has work while a rank encodes, sums or
// decodes. Who owns what does not change, nor does any bit. For each piece in order: fill, post() for all; swap(), fill,
// share() for all; gather() for all.
#pragma once

#include <deque>
#include <vector>

#include "collectives/two_shot.h"
#include "device_kernels.h"

namespace gossamer {

class Hops {
 public:
  struct Piece {
    int64_t begin, numel;       // elements of every row
    int64_t row_bytes, offset;  // on the wire; where its size() rows begin there, one behind the other
  };

  // Rows of `chunk` elements. `whole`: size() rows of the caller's own to send from and gather into, instead of scratch
  // memory; only without peer memory, see `in_place`.
  Hops(Communicator& comm, Scratch& scratch, at::Device device, const CodecChoice& codec,
       const codec::Spec& spec, int64_t chunk, const at::Tensor& whole = at::Tensor());

  const std::vector<Piece>& pieces() const { return pieces_; }
  // Row j is for rank j; to be filled before post(), and not written after it.
  uint8_t* send(const Piece& piece) const { return send_ + piece.offset; }
  void post(const Piece& piece);
  // Row `rank` of every rank's, in rank order.
  codec::WireRows swap(const Piece& piece);
  // The row for everyone; to be filled between swap() and share(). It may be the row that was sent to this rank itself.
  uint8_t* own(const Piece& piece) const;
  void share(const Piece& piece);
  // Every rank's own row, in rank order. It may be `whole`.
  codec::WireRows gather(const Piece& piece);
  bool in_place() const { return in_place_; }  // gather() leaves its rows in `whole`

 private:
  codec::WireRows rows_at(int64_t offset);
  void meet();
  PendingPtr& pending(const Piece& piece);
  size_t number(const Piece& piece) const { return static_cast<size_t>(&piece - pieces_.data()); }
  bool in_turns() const { return pieces_.size() > 1; }
  size_t hop_items() const { return pieces_.size() * static_cast<size_t>(comm_.size() - 1); }
  bool may_send(size_t item) const;
  void send_next();
  void wait_for(const Piece& piece, size_t items);
  at::Tensor rows_of(const at::Tensor& memory, const Piece& piece) const;
  at::Tensor received(const Piece& piece, int row) const;
  int64_t sent_at(const Piece& piece, int row) const;
  at::Tensor sent(const Piece& piece, int row) const;

  Communicator& comm_;
  PeerRows peers_;
  bool in_place_ = false;
  std::vector<Piece> pieces_;
  std::vector<PendingPtr> pending_;  // of the hop that is under way, a piece each
  // Of both hops in pieces, see send_next(): rows in the order in which they are sent.
  size_t posted_ = 0, shared_ = 0;  // pieces
  size_t sent_ = 0, arrived_ = 0;
  size_t in_flight_ = 0;  // rows at most
  std::deque<PendingPtr> flying_;
  at::Tensor sending_, receiving_;  // without peer memory
  uint8_t *send_ = nullptr, *own_ = nullptr;
  std::vector<const uint8_t*> rows_;
};

// The kernels' encode and decode for one piece of a matrix.
void encode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const at::Tensor& x,
                  const codec::Rows& rows, const Hops::Piece& piece, uint8_t* wire);
void decode_piece(const DeviceKernels& kernels, const codec::Spec& spec, const codec::WireRows& wire,
                  const codec::Rows& rows, const Hops::Piece& piece, const at::Tensor& out);

}  // namespace gossamer
