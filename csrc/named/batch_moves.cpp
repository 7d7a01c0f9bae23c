// allgather, broadcast and alltoall of batch_runner.h: they move bytes, whatever the elements are.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <numeric>

#include "named/batch_runner.h"
#include "named/elements.h"

namespace gossamer::named {
namespace {

// If padding makes the rows more than this many times larger, a broadcast from each rank costs less.
constexpr int64_t kMostPadding = 2;

int64_t row_bytes(const negotiate::Request& request) {
  return std::accumulate(request.shape.begin() + 1, request.shape.end(), int64_t{request.element_bytes},
                         std::multiplies<int64_t>());
}

at::Tensor with_rows(const at::Tensor& like, int64_t rows) {
  auto shape = like.sizes().vec();
  shape[0] = rows;
  return at::empty(shape, like.options());
}

}  // namespace

void BatchRunner::allgather(Communicator& comm, Pieces& pieces) {
  const int size = comm.size();
  std::vector<int64_t> bytes(size);  // of each rank, of all pieces
  for (const Piece& piece : pieces) {
    for (int rank = 0; rank < size; ++rank) {
      bytes[rank] += piece.response->sizes[rank] * row_bytes(piece.response->request);
    }
  }
  const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  const int64_t most = *std::max_element(bytes.begin(), bytes.end());
  const bool equal = most * size == total;
  const bool padded = most * size <= kMostPadding * total;
  for (Piece& piece : pieces) {
    const auto& sizes = piece.response->sizes;
    piece.data->output = with_rows(piece.input, std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  }
  if (total == 0) return;
  const auto options = at::TensorOptions().dtype(at::kByte).device(pieces.front().input.device());
  const bool direct = pieces.size() == 1 && (equal || !padded);  // the result needs no unpacking
  const int64_t stride = padded ? most : 0;
  at::Tensor all =
      direct ? as_bytes(pieces.front().data->output) : at::empty({padded ? most * size : total}, options);
  std::vector<int64_t> begins(size);  // of each rank's bytes in `all`
  for (int rank = 1; rank < size; ++rank)
    begins[rank] = begins[rank - 1] + (padded ? stride : bytes[rank - 1]);

  at::Tensor mine =
      padded ? at::empty({most}, options) : all.narrow(0, begins[comm.rank()], bytes[comm.rank()]);
  if (pieces.size() == 1 && equal) {
    mine = as_bytes(pieces.front().input);
  } else {
    int64_t at = 0;
    for (const Piece& piece : pieces) {
      const auto part = as_bytes(piece.input);
      mine.narrow(0, at, part.numel()).copy_(part);
      at += part.numel();
    }
  }
  if (padded) {
    comm.all_gather(all, mine)->wait();
  } else {
    for (int rank = 0; rank < size; ++rank) {
      if (bytes[rank] > 0) comm.broadcast(all.narrow(0, begins[rank], bytes[rank]), rank)->wait();
    }
  }
  if (direct) return;
  for (const Piece& piece : pieces) {
    const auto out = as_bytes(piece.data->output);
    int64_t at = 0;
    for (int rank = 0; rank < size; ++rank) {
      const int64_t part = piece.response->sizes[rank] * row_bytes(piece.response->request);
      out.narrow(0, at, part).copy_(all.narrow(0, begins[rank], part));
      begins[rank] += part;
      at += part;
    }
  }
}

void BatchRunner::broadcast(Communicator& comm, Piece& piece) {
  const bool in_place = piece.data->target.defined();
  const bool roots = comm.rank() == piece.response->request.root;
  at::Tensor out = piece.input;  // the target itself, if it is contiguous
  if (!in_place && roots)
    out = piece.input.is_alias_of(piece.data->input) ? piece.input.clone() : piece.input;
  if (!in_place && !roots) out = at::empty_like(piece.input);
  if (out.numel() > 0) comm.broadcast(as_bytes(out), piece.response->request.root)->wait();
  finish(piece, out);
}

void BatchRunner::alltoall(Communicator& comm, Piece& piece) {
  const int size = comm.size();
  const int64_t row = row_bytes(piece.response->request);
  const auto& sizes = piece.response->sizes;
  std::vector<int64_t> in_bytes, out_bytes;
  int64_t rows = 0;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t received = sizes[rank * size + comm.rank()];
    piece.data->received_splits.push_back(received);
    rows += received;
    out_bytes.push_back(received * row);
    in_bytes.push_back(sizes[comm.rank() * size + rank] * row);
  }
  piece.data->output = with_rows(piece.input, rows);
  if (piece.response->bytes == 0) return;
  comm.all_to_all_unequal(as_bytes(piece.data->output), as_bytes(piece.input), out_bytes, in_bytes)->wait();
}

}  // namespace gossamer::named
