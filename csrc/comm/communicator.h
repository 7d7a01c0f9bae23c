// The communicator: moves bytes between the ranks of one group, knows no codec and no bucket. Implemented by
// c10d.h; used by collectives/ and engine/. There is no hidden default group.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

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
  virtual PendingPtr exchange(at::Tensor out, at::Tensor x, int to, int source) = 0;  // one send, one receive

  // Zero-filled memory for a bucket that this group's wire can reach; 64-byte aligned.
  virtual at::Tensor allocate(int64_t bytes);

  // Lets the ranks that wait for this one know, as far as the group can, that it has failed.
  virtual void announce_failure() noexcept {}

  // Payload bytes this rank has handed to other ranks since construction.
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 protected:
  void count_sent(int64_t bytes) {
    bytes_sent_.fetch_add(static_cast<uint64_t>(bytes), std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> bytes_sent_{0};
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace gossamer
