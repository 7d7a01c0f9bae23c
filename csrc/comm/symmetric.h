// A communicator whose ranks share one host and read each other's buckets in place, on CUDA devices: allocate() returns
// symmetric memory. Its operations are those of the communicator that it is made of; route/ works in the memory itself.
#pragma once

#include <map>
#include <mutex>

#include "backend/peers.h"
#include "comm/forwarding.h"

namespace gossamer {

class SymmetricCommunicator : public Forwarding {
 public:
  // `control`: the same ranks, for CPU tensors; the same object as `other` where that is on the CPU.
  SymmetricCommunicator(CommunicatorPtr other, CommunicatorPtr control, std::unique_ptr<PeerGroup> group);
  ~SymmetricCommunicator() override;

  // Collective. It blocks the host, and cannot be done while a graph is captured.
  at::Tensor allocate(int64_t bytes) override;
  // Collective. Each rank writes a number into every rank's memory and reads one from it, on the device. Returns the ranks
  // from whom a number did not arrive here, or from whose memory it could not be read.
  std::vector<int> unreached_peers();
  bool shares_memory() const override { return true; }
  PeerBlock* peers_of(const at::Tensor& x) override;

  void tell(const std::string& text) noexcept override;
  std::string trouble() noexcept override;
  std::string capture_refusal() const override { return ""; }
  uint64_t bytes_sent() const override { return Communicator::bytes_sent() + other_->bytes_sent(); }
  uint64_t bytes_received() const override {
    return Communicator::bytes_received() + other_->bytes_received();
  }

 private:
  std::pair<at::Tensor, PeerBlock> new_block(int64_t bytes);
  void free_unused();
  void require_no_capture(int64_t bytes) const;
  // Throws on every rank if any rank has something to tell.
  void agree(int64_t bytes, const std::string& problem);
  // Runs a part of unreached_peers() on every rank, and waits until all ranks' devices have done it.
  template <class Part>
  void together(int64_t bytes, const Part& part);

  CommunicatorPtr control_;
  std::unique_ptr<PeerGroup> group_;
  std::mutex mutex_;  // guards blocks_: the engine's worker reads it, any thread allocates
  std::map<const void*, PeerBlock> blocks_;  // by this rank's base
  std::atomic<bool> failed_{false};
};

}  // namespace gossamer
