// How rows of bytes travel: in a first hop to their owners, in a second hop from each owner to everyone. There are three
// ways: whole.cpp, one operation of the group for each hop; turns.cpp, in pieces, one after the other, where a link is slow;
// peers.cpp, in memory that all ranks read in each other. open_rows() chooses one. The choice changes neither the owners
// nor any bit. Used by collectives/ for one call, in this order: for all pieces fill and post(); for all swap(), fill and
// share(); for all gather().
#pragma once

#include <memory>
#include <vector>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "route/scratch.h"

namespace gossamer {

struct Piece {
  int64_t begin, numel;       // elements of every row
  int64_t row_bytes, offset;  // on the wire; where its size() rows begin there, one after the other
};

// Elements of each part, where `numel` elements make `parts` parts: whole blocks; the last parts are short or empty.
int64_t chunk_numel(int64_t numel, int64_t parts, int64_t block);

enum class Hops { both, first, second };

struct Shape {  // of the rows
  codec::Spec spec;
  int64_t chunk;  // elements of each
  // Whether a row can be cut into pieces that are encoded separately. Not with statistics of whole rows, nor with random
  // numbers, which depend on an element's place in the row.
  bool divisible;
  at::Device device;
  Hops hops = Hops::both;
  at::Tensor whole{};  // the caller's size() rows, to send from and gather into (in_place()), or undefined
};

class Rows {
 public:
  Rows(Communicator& comm, const Shape& shape, int64_t piece_bytes);
  virtual ~Rows() = default;

  const std::vector<Piece>& pieces() const { return pieces_; }
  // Row j is for rank j; to be filled before post(), and unchanged after it.
  virtual uint8_t* send(const Piece& piece) = 0;
  virtual void post(const Piece& piece) = 0;
  // Row `rank` of every rank, in rank order.
  virtual codec::WireRows swap(const Piece& piece) = 0;
  // The row for everyone; to be filled between swap() and share(). May be the row that was sent to this rank itself.
  virtual uint8_t* own(const Piece& piece) = 0;
  virtual void share(const Piece& piece) = 0;
  // The row for everyone of each rank, in rank order.
  virtual codec::WireRows gather(const Piece& piece) = 0;
  // Rows are sent from `whole`, and gather() leaves them there.
  virtual bool in_place() const { return false; }

 protected:
  size_t number(const Piece& piece) const { return static_cast<size_t>(&piece - pieces_.data()); }

  Communicator& comm_;
  std::vector<Piece> pieces_;  // one, if piece_bytes is 0
};
using RowsPtr = std::unique_ptr<Rows>;

// Collective. The rows use the memory of `scratch` as long as they exist.
RowsPtr open_rows(Communicator& comm, Scratch& scratch, const Shape& shape);
RowsPtr whole_rows(Communicator& comm, Scratch& scratch, const Shape& shape);
RowsPtr rows_in_turns(Communicator& comm, Scratch& scratch, const Shape& shape);
RowsPtr rows_of_peers(Communicator& comm, const Shape& shape);

// Moves bytes without decoding, x and out contiguous: row j of x goes to rank j, row i of out comes from rank i.
void swap_rows(Communicator& comm, at::Tensor out, const at::Tensor& x);
// out becomes every rank's x.
void gather_rows(Communicator& comm, at::Tensor out, const at::Tensor& x);

}  // namespace gossamer
