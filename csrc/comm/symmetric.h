// A communicator whose ranks share one host and read each other's buckets in place, on CUDA devices: what it allocates
// is symmetric memory, and sums of that need no transport. Everything else goes through the communicator that it is made
// of. Not a two-shot through a codec: collectives/ makes that, in its scratch.
#pragma once

#include <map>
#include <mutex>
#include <optional>

#include "backend/peers.h"
#include "comm/communicator.h"

namespace gossamer {

class SymmetricCommunicator : public Communicator {
 public:
  // `control`: the same ranks, for CPU tensors; the same object as `other` where that is on the CPU.
  SymmetricCommunicator(CommunicatorPtr other, CommunicatorPtr control, std::unique_ptr<PeerGroup> group);
  ~SymmetricCommunicator() override;

  int rank() const override { return other_->rank(); }
  int size() const override { return other_->size(); }
  at::Device device() const override { return other_->device(); }

  // Directly where x is a sum of floats in memory from allocate(): then all ranks give the same part of the same
  // allocation, and the bits are those of sum_in_place.
  PendingPtr all_reduce(at::Tensor x, ReduceOp op) override;
  PendingPtr reduce_scatter(at::Tensor out, at::Tensor x) override { return other_->reduce_scatter(out, x); }
  PendingPtr all_gather(at::Tensor out, at::Tensor x) override { return other_->all_gather(out, x); }
  PendingPtr all_to_all(at::Tensor out, at::Tensor x) override { return other_->all_to_all(out, x); }
  PendingPtr broadcast(at::Tensor x, int source) override { return other_->broadcast(x, source); }
  PendingPtr exchange(const std::vector<Swap>& swaps) override { return other_->exchange(swaps); }

  // Collective. It blocks the host, and cannot be done while a graph is captured.
  at::Tensor allocate(int64_t bytes) override;
  bool sum_in_place(const at::Tensor& x, double scale) override;
  PeerRows peer_rows(int64_t row_bytes) override;

  void announce_failure() noexcept override;
  std::string capture_refusal() const override { return ""; }
  uint64_t bytes_sent() const override { return Communicator::bytes_sent() + other_->bytes_sent(); }
  uint64_t bytes_received() const override {
    return Communicator::bytes_received() + other_->bytes_received();
  }

 private:
  // The block that x lies in; the map's entries stay where they are while they live.
  PeerBlock* find(const at::Tensor& x);
  std::pair<at::Tensor, PeerBlock> new_block(int64_t bytes);
  void free_unused();
  void require_no_capture(int64_t bytes) const;
  // Throws on every rank if any rank has something to tell.
  void agree(int64_t bytes, const std::string& problem);

  CommunicatorPtr other_;
  CommunicatorPtr control_;
  std::unique_ptr<PeerGroup> group_;
  std::mutex mutex_;  // of blocks_: the engine's worker looks there, any thread allocates
  std::map<const void*, PeerBlock> blocks_;  // by this rank's base
  struct Rows {
    int64_t row_bytes = 0;
    at::Tensor memory;
    std::optional<PeerBlock> block;
  };
  Rows rows_;
  std::atomic<bool> failed_{false};
};

}  // namespace gossamer
