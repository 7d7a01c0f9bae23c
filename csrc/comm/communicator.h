// The communicator: moves bytes between the ranks of one group, knows no codec and no bucket. Implemented by
// c10d.h, and by symmetric.h around that; used by collectives/ and engine/. There is no hidden default group.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gossamer {

enum class ReduceOp : int { sum = 0, max = 1 };

// One operation in flight. wait() blocks the host for CPU groups, the current stream for NCCL; it throws
// PythonError(comm) with the operation, its size and the ranks that have gone silent.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void wait() = 0;
};
using PendingPtr = std::unique_ptr<Pending>;

struct Swap {  // one message to rank `to` and one from rank `source`
  at::Tensor out, x;
  int to, source;
};

class PeerBlock;  // backend/peers.h

// Memory on every rank that all of them read in place: size() rows from its beginning, for what a rank sends to each, and
// behind them one for what it has for all.
struct PeerRows {
  PeerBlock* block = nullptr;  // null: this group has no such memory
  int64_t for_all = 0;         // where that one is, in bytes: the same in every call until the memory grows
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual at::Device device() const = 0;

  // All tensors are contiguous and on device(). Every rank calls with equal shapes and dtypes.
  virtual PendingPtr all_reduce(at::Tensor x, ReduceOp op) = 0;         // in place
  virtual PendingPtr reduce_scatter(at::Tensor out, at::Tensor x) = 0;  // sum; x is size() parts of out
  virtual PendingPtr all_gather(at::Tensor out, at::Tensor x) = 0;      // out is size() parts of x
  virtual PendingPtr all_to_all(at::Tensor out, at::Tensor x) = 0;      // equal parts
  virtual PendingPtr broadcast(at::Tensor x, int source) = 0;           // in place
  virtual PendingPtr exchange(const std::vector<Swap>& swaps) = 0;      // all at once

  // Zero-filled memory for a bucket that this group's wire can reach; 64-byte aligned.
  virtual at::Tensor allocate(int64_t bytes);

  // x, contiguous and on device(), becomes scale * the sum over ranks in rank order from zero, by reading it where it is:
  // in memory that allocate() made, the same part on every rank. False, and nothing has happened, where that is not so.
  virtual bool sum_in_place(const at::Tensor&, double /*scale*/) { return false; }

  // For a collective that sends and gets rows of row_bytes; collective where it has to grow. Until the next call.
  virtual PeerRows peer_rows(int64_t /*row_bytes*/) { return {}; }

  // Rows of bytes that are longer travel sooner in pieces of about this length, each an operation; 0: whole. The same on
  // all ranks between two operations.
  virtual int64_t piece_bytes() const { return 0; }
  // What a link takes between a rank's word that it receives and what comes of it: as much must be under way at least.
  virtual int64_t flight_bytes() const { return 0; }

  // Why a CUDA graph cannot hold what this group does; empty if it can.
  virtual std::string capture_refusal() const { return "its group is not known to work in a graph"; }

  // Lets the ranks that wait for this one know, as far as the group can, that it has failed.
  virtual void announce_failure() noexcept {}

  // Payload bytes this rank has handed to other ranks since construction.
  virtual uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  // And has taken from them.
  virtual uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }

 protected:
  void count(int64_t sent, int64_t received) {
    bytes_sent_.fetch_add(static_cast<uint64_t>(sent), std::memory_order_relaxed);
    bytes_received_.fetch_add(static_cast<uint64_t>(received), std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace gossamer
