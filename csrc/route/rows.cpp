// See rows.h: the choice of a way, and the cutting of rows.
#include "route/rows.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "codec/codec_list.h"
#include "route/route.h"

namespace gossamer {
namespace {

constexpr int64_t kLeastBlock = 64;  // elements; rows are aligned on the wire in any case

Shape shape_of_bytes(int64_t row_bytes, Hops hops) {
  return {{codec::Kind::identity, Dtype::f32, 1}, (row_bytes + 3) / 4, true, at::kCPU, hops};
}

bool goes_in_pieces(Communicator& comm, int64_t row_bytes) {
  Pace& pace = Route::of(comm).pace();
  pace.decide(comm, row_bytes);
  return pace.piece_bytes() > 0 && row_bytes > pace.piece_bytes();
}

template <class Operation>
void run_whole(Communicator& comm, int64_t row_bytes, const Operation& operation) {
  const auto begun = std::chrono::steady_clock::now();
  operation()->wait();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begun;
  Route::of(comm).pace().measured(comm, row_bytes, elapsed.count());
}

}  // namespace

int64_t chunk_numel(int64_t numel, int64_t parts, int64_t block) {
  return (numel + parts * block - 1) / (parts * block) * block;
}

Rows::Rows(Communicator& comm, const Shape& shape, int64_t piece_bytes) : comm_(comm) {
  const int64_t row_bytes = codec::row_bytes(shape.spec, shape.chunk);
  int64_t numel = shape.chunk;
  if (piece_bytes > 0 && row_bytes > piece_bytes && shape.divisible) {
    const int64_t count = std::min(Pace::kMostPieces, (row_bytes + piece_bytes - 1) / piece_bytes);
    const int64_t block = shape.spec.block * ((kLeastBlock + shape.spec.block - 1) / shape.spec.block);
    numel = chunk_numel(shape.chunk, count, block);
  }
  int64_t offset = 0;
  for (int64_t begin = 0; begin < shape.chunk; begin += numel) {
    const int64_t length = std::min(numel, shape.chunk - begin);
    pieces_.push_back({begin, length, codec::row_bytes(shape.spec, length), offset});
    offset += comm.size() * pieces_.back().row_bytes;
  }
}

RowsPtr open_rows(Communicator& comm, Scratch& scratch, const Shape& shape) {
  // With only one hop, nothing would keep a rank from writing its rows of the next call too early.
  if (comm.shares_memory() && shape.hops == Hops::both) return rows_of_peers(comm, shape);
  const bool pieces = goes_in_pieces(comm, codec::row_bytes(shape.spec, shape.chunk));
  return pieces ? rows_in_turns(comm, scratch, shape) : whole_rows(comm, scratch, shape);
}

void swap_rows(Communicator& comm, at::Tensor out, const at::Tensor& x) {
  const int64_t row = static_cast<int64_t>(x.nbytes()) / comm.size();
  if (!goes_in_pieces(comm, row)) return run_whole(comm, row, [&] { return comm.all_to_all(out, x); });
  Scratch scratch;
  const RowsPtr rows = rows_in_turns(comm, scratch, shape_of_bytes(row, Hops::first));
  const auto each = [&](const Piece& piece, const auto& call) {
    const int64_t begin = 4 * piece.begin, bytes = std::min(4 * piece.numel, row - begin);
    for (int rank = 0; rank < comm.size(); ++rank) call(rank, rank * row + begin, bytes);
  };
  for (const Piece& piece : rows->pieces()) {
    each(piece, [&](int rank, int64_t at, int64_t bytes) {
      std::memcpy(rows->send(piece) + rank * piece.row_bytes, bytes_of(x) + at, static_cast<size_t>(bytes));
    });
    rows->post(piece);
  }
  for (const Piece& piece : rows->pieces()) {
    const codec::WireRows received = rows->swap(piece);
    each(piece, [&](int rank, int64_t at, int64_t bytes) {
      std::memcpy(bytes_of(out) + at, received.row(rank, piece.row_bytes), static_cast<size_t>(bytes));
    });
  }
}

void gather_rows(Communicator& comm, at::Tensor out, const at::Tensor& x) {
  const auto row = static_cast<int64_t>(x.nbytes());
  if (!goes_in_pieces(comm, row)) return run_whole(comm, row, [&] { return comm.all_gather(out, x); });
  Scratch scratch;
  const RowsPtr rows = rows_in_turns(comm, scratch, shape_of_bytes(row, Hops::second));
  const auto length = [row](const Piece& piece) {
    return static_cast<size_t>(std::min(4 * piece.numel, row - 4 * piece.begin));
  };
  for (const Piece& piece : rows->pieces()) {
    std::memcpy(rows->own(piece), bytes_of(x) + 4 * piece.begin, length(piece));
    rows->share(piece);
  }
  for (const Piece& piece : rows->pieces()) {
    const codec::WireRows all = rows->gather(piece);
    for (int rank = 0; rank < comm.size(); ++rank)
      std::memcpy(bytes_of(out) + rank * row + 4 * piece.begin, all.row(rank, piece.row_bytes),
                  length(piece));
  }
}

}  // namespace gossamer
