// Memory of the ranks of one host that all of them read and write, through torch's symmetric memory: on CUDA devices
// torch's own allocator, on the host ours (symmetric_memory.cpp). Devices that do not reach each other read and write the
// host's, which each process then maps for its device. Knows nothing of communicators; comm/symmetric.h uses it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d::symmetric_memory {
class SymmetricMemory;
}

namespace gossamer {

// A block of equal size on every rank.
class PeerBlock {
 public:
  // `device`: whose kernels use the block. If `memory` is on the host instead, it is mapped for the device.
  PeerBlock(const at::Tensor& memory, c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle,
            at::Device device, int64_t timeout_ms);
  ~PeerBlock();
  PeerBlock(PeerBlock&&) noexcept;
  PeerBlock& operator=(PeerBlock&&) noexcept;

  // The address of each rank's part, by rank, as this rank's kernels see it; its own is among them. 16-byte aligned.
  const std::vector<uint8_t*>& bases() const { return bases_; }
  int64_t bytes() const { return bytes_; }
  bool is_in_use() const { return !storage_.expired(); }  // this rank's tensor, or a view of it, lives
  // Whether x, which is dense, lies in this rank's memory.
  bool holds(const at::Tensor& x) const;

  // Orders the current streams of all ranks: what this rank queues next begins once all that any rank queued before its
  // meet() is done. On the CPU it returns at that time. On CUDA the host does not wait. The device waits for timeout_ms
  // at most. Then no later CUDA call of this process works, and missing() names a rank.
  // Meetings of different channels are apart, so two streams can meet those of other ranks at the same time.
  static constexpr int kChannels = 2;
  void meet(int channel = 0);
  // The rank that did not come to a meeting of the devices in time.
  std::optional<int> missing() const;

  // Lets the device wait for nobody any more, now and in later meetings. What it then reads of others may be anything.
  void give_up() noexcept;

  // Gives up the memory without freeing it: the device may be waiting in it for a rank that is gone.
  void leak() noexcept;

 private:
  at::Device device_;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle_;
  std::vector<std::shared_ptr<uint8_t>> mapped_;  // memory on the host, as the device's kernels see it
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  std::vector<uint8_t*> bases_;
  // By channel, for meetings of the devices; empty where the handle's own barrier serves.
  std::vector<std::vector<uint32_t*>> pads_;
  at::Tensor missing_;  // [1] on the host, which the device writes
  int64_t bytes_;
  int64_t timeout_ms_;
};

// The ranks, under a name by which torch's rendezvous finds them.
class PeerGroup {
 public:
  // `store`: used by this group alone. `device`: of the ranks. `backend`: the backend "gossamer" of these ranks, for memory
  // on the host; null for memory on CUDA devices.
  PeerGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, at::Device device,
            const c10::intrusive_ptr<c10d::Backend>& backend, int64_t timeout_ms);
  ~PeerGroup();
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;

  // This rank's part of a block: uint8 [bytes], zeros. Not collective, so an error concerns this rank alone.
  at::Tensor reserve(int64_t bytes) const;
  // Collective: the parts that reserve() returned on the ranks become one block. All ranks must make these calls, for all
  // groups, in the same order, because torch numbers them in each process.
  PeerBlock join(const at::Tensor& memory) const;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
  at::Device device_, memory_device_;
  int64_t timeout_ms_;
};

}  // namespace gossamer
