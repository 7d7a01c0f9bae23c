// Communicators whose ranks share one host, and read in place the memory that allocate_shared() returns. Their operations
// are those of the communicator that they are made of; route/ works in the memory itself.
#pragma once

#include <map>
#include <mutex>

#include "backend/peers.h"
#include "comm/forwarding.h"

namespace gossamer {

// For devices that read each other's memory, and for the CPU: allocate() too returns memory that all ranks read.
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

  bool queues_on_device() const override { return !device().is_cpu() && !host_timeout_; }
  void wait_on_host(std::chrono::milliseconds timeout) override;
  void wait_for_device() override;
  void abort() override;
  void tell(const std::string& text) noexcept override;
  std::string trouble() noexcept override;
  std::string capture_refusal() const override { return host_timeout_ ? other_->capture_refusal() : ""; }
  uint64_t bytes_sent() const override { return Communicator::bytes_sent() + other_->bytes_sent(); }
  uint64_t bytes_received() const override {
    return Communicator::bytes_received() + other_->bytes_received();
  }

 private:
  virtual const char* kind() const { return "symmetric memory"; }  // for errors
  std::pair<at::Tensor, PeerBlock> new_block(int64_t bytes);
  void free_unused();
  void give_up_meetings() noexcept;
  void require_no_capture(int64_t bytes) const;
  // Throws on every rank if any rank has something to tell.
  void agree(int64_t bytes, const std::string& problem);
  // Runs a part of unreached_peers() on every rank, and waits until all ranks' devices have done it.
  template <class Part>
  void together(int64_t bytes, const Part& part);

  CommunicatorPtr control_;
  std::unique_ptr<PeerGroup> group_;
  std::mutex mutex_;  // guards blocks_: the engine's worker reads it, any thread allocates
  std::map<const void*, PeerBlock> blocks_;                // by this rank's base
  std::optional<std::chrono::milliseconds> host_timeout_;  // see wait_on_host()
  std::atomic<bool> failed_{false};
};

// For devices that do not: the shared memory is the host's. Buckets stay on the device, and a kernel moves rows between the
// two as it encodes and decodes them.
class HostMemoryCommunicator : public SymmetricCommunicator {
 public:
  using SymmetricCommunicator::SymmetricCommunicator;
  at::Tensor allocate(int64_t bytes) override { return other_->allocate(bytes); }
  at::Tensor allocate_shared(int64_t bytes) override { return SymmetricCommunicator::allocate(bytes); }
  bool sums_by_rows() const override { return true; }

 private:
  const char* kind() const override { return "host memory"; }
};

}  // namespace gossamer
