// See hops.h. Through peers' memory the ranks meet twice a call. The first meeting is also what keeps a rank from writing
// its own row anew while another still reads that of the call before; it lies where it lay then.
#include "collectives/hops.h"

#include "backend/peers.h"

namespace gossamer {

Hops::Hops(Communicator& comm, Scratch& scratch, at::Device device, int64_t row_bytes,
           const at::Tensor& whole)
    : comm_(comm), row_bytes_(row_bytes), peers_(comm.peer_rows(row_bytes)) {
  if (peers_.block != nullptr) {
    send_ = peers_.block->bases().at(static_cast<size_t>(comm.rank()));
    own_ = send_ + peers_.for_all;
    return;
  }
  in_place_ = whole.defined();
  sending_ = in_place_ ? whole : scratch.send(comm.size() * row_bytes, device);
  receiving_ = scratch.receive(comm.size() * row_bytes, device);
  send_ = bytes_of(sending_);
  own_ = send_ + comm.rank() * row_bytes;  // after the all-to-all this rank's own row is free
}

codec::WireRows Hops::rows_at(int64_t offset) {
  rows_.clear();
  for (const uint8_t* base : peers_.block->bases()) rows_.push_back(base + offset);
  return codec::WireRows(rows_.data());
}

codec::WireRows Hops::swap() {
  if (peers_.block != nullptr) {
    peers_.block->meet();
    return rows_at(comm_.rank() * row_bytes_);
  }
  comm_.all_to_all(receiving_, sending_)->wait();
  return bytes_of(receiving_);
}

codec::WireRows Hops::gather() {
  if (peers_.block != nullptr) {
    peers_.block->meet();
    return rows_at(peers_.for_all);
  }
  comm_.all_gather(sending_, sending_.narrow(0, comm_.rank() * row_bytes_, row_bytes_))->wait();
  return bytes_of(sending_);
}

}  // namespace gossamer
