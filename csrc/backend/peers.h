// Memory that the ranks of one host read and write in each other, by torch's symmetric memory: on CUDA devices torch's
// own allocator, on the CPU ours (symmetric_memory.cpp). Knows nothing of communicators; comm/symmetric.h uses it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

namespace c10d::symmetric_memory {
class SymmetricMemory;
}

namespace gossamer {

// A block of equal size on every rank.
class PeerBlock {
 public:
  PeerBlock(const at::Tensor& memory, c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle,
            int64_t timeout_ms);
  ~PeerBlock();
  PeerBlock(PeerBlock&&) noexcept;
  PeerBlock& operator=(PeerBlock&&) noexcept;

  // Of rank 0, 1, ..., as this rank sees them; this rank's own among them. 16-byte aligned.
  const std::vector<uint8_t*>& bases() const { return bases_; }
  int64_t bytes() const { return bytes_; }
  bool is_in_use() const { return !storage_.expired(); }  // this rank's tensor, or a view of it, lives
  // Whether x, which is dense, lies in this rank's memory.
  bool holds(const at::Tensor& x) const;

  // All that the ranks have queued on their current streams before is done, on every rank, when what this rank queues
  // next begins. On the CPU it returns then. The host does not wait for a device; the device waits, for timeout_ms at
  // most, and then ends with an error that torch prints, which no later call of this process outlives.
  void meet();

  // Gives up the memory without freeing it: the device may be waiting in it for a rank that is gone.
  void leak() noexcept;

 private:
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  std::vector<uint8_t*> bases_;
  int64_t bytes_;
  int64_t timeout_ms_;
};

// The ranks, under a name that torch's rendezvous finds them by.
class PeerGroup {
 public:
  // `store`: of this group alone. `backend`: the backend "gossamer" of a group of CPU tensors; null for CUDA.
  PeerGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, at::Device device,
            const c10::intrusive_ptr<c10d::Backend>& backend, int64_t timeout_ms);
  ~PeerGroup();
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;

  // This rank's part of a block: uint8 [bytes], zeros. Not collective, so an error is this rank's alone.
  at::Tensor reserve(int64_t bytes) const;
  // Collective: what reserve() has returned on each rank becomes one block. All ranks make their calls, of all groups,
  // in the same order, because torch numbers them by process.
  PeerBlock join(const at::Tensor& memory) const;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
  at::Device device_;
  int64_t timeout_ms_;
};

}  // namespace gossamer
