// The communicator: moves bytes between the ranks of one group, and knows no codec and no bucket. Implemented by c10d.h,
// and by symmetric.h around that; used by collectives/ and engine/. There is no hidden default group.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gossamer {

enum class ReduceOp : int { sum = 0, max = 1, min = 2, product = 3 };

// One operation in flight. wait() blocks the host for CPU groups, and the current stream for NCCL, but see
// Communicator::wait_on_host(). It throws PythonError(comm) with the operation, its size and the ranks that have gone silent.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void wait() = 0;
};
using PendingPtr = std::unique_ptr<Pending>;

// One message to rank `to` and one from rank `source`. An undefined or empty tensor stands for no message.
struct Swap {
  at::Tensor out, x;
  int to, source;
};

class ByHosts;     // comm/by_hosts.h
class CallAcross;  // backend/across.h
class PeerBlock;   // backend/peers.h
class Route;       // route/route.h

class Communicator {
 public:
  static constexpr const char* kFailed = "failed: it gave up after an error of its own";

  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual at::Device device() const = 0;

  // All tensors are contiguous and on device(). Every rank calls with equal shapes and dtypes.
  virtual PendingPtr all_reduce(at::Tensor x, ReduceOp op) = 0;  // in place
  // x is size() parts of out.
  virtual PendingPtr reduce_scatter(at::Tensor out, at::Tensor x, ReduceOp op = ReduceOp::sum) = 0;
  virtual PendingPtr all_gather(at::Tensor out, at::Tensor x) = 0;  // out is size() parts of x
  virtual PendingPtr all_to_all(at::Tensor out, at::Tensor x) = 0;  // equal parts
  // uint8 [n], any length on each rank. x holds x_bytes[i] for rank i; out gets out_bytes[i] from rank i, in rank order.
  virtual PendingPtr all_to_all_unequal(at::Tensor out, at::Tensor x, std::vector<int64_t> out_bytes,
                                        std::vector<int64_t> x_bytes) = 0;
  virtual PendingPtr broadcast(at::Tensor x, int source) = 0;       // in place
  virtual PendingPtr exchange(const std::vector<Swap>& swaps) = 0;  // all at once

  // Whether what crosses hosts can be the messages of a call that hosts have not compared; see backend/across.h.
  virtual bool takes_calls() const { return false; }
  // all_to_all, all_gather and exchange belong to `call` from now on, until it is null again. They may throw CallsDiffer.
  virtual void set_call(CallAcross* /*call*/) {}

  // Whether the group reduces int16, uint16 and uint32 besides what Gloo and NCCL reduce.
  virtual bool reduces_every_integer() const { return false; }

  // Zero-filled memory for a bucket, which this group's transport can reach; 64-byte aligned.
  virtual at::Tensor allocate(int64_t bytes);

  // Whether all ranks read each other's memory from allocate_shared().
  virtual bool shares_memory() const { return false; }
  // Memory for rows that all ranks read in place, if shares_memory(). May be on the host, for the device's kernels alone.
  virtual at::Tensor allocate_shared(int64_t bytes) { return allocate(bytes); }
  // The memory of all ranks that holds x, if x is such memory and the ranks read each other's; else null.
  virtual PeerBlock* peers_of(const at::Tensor& /*x*/) { return nullptr; }
  // Whether exact sums of floats go as rows too, and not by all_reduce().
  virtual bool sums_by_rows() const { return false; }

  // This communicator, if sums go through its hosts; else null.
  virtual ByHosts* by_hosts() { return nullptr; }
  // The number of parts of a sum that are each computed by one rank.
  virtual int64_t chunks() const { return size(); }

  // Whether its bytes go through the host's sockets, which a long message may keep busy: see route/pace.h.
  virtual bool uses_sockets() const { return false; }

  // Whether its operations, and sums through it, are only queued on the device: the host does not wait for other ranks.
  virtual bool queues_on_device() const { return false; }

  // Whether sums that are queued on different streams of the device may be on their way at the same time.
  virtual bool overlaps_sums() const { return false; }

  // Why a CUDA graph cannot hold this group's operations; empty if it can.
  virtual std::string capture_refusal() const { return "its group is not known to work in a graph"; }

  // Limits each later operation, where the group's operations have a limit that can change.
  virtual void set_timeout(std::chrono::milliseconds /*timeout*/) {}

  // For groups whose members may die. From now on an operation on an accelerator has ended on the device when its wait()
  // returns, and wait() throws if the group fails, or the operation takes longer than `timeout`. What is in flight is
  // aborted then. Nothing changes where wait() does so already.
  virtual void wait_on_host(std::chrono::milliseconds /*timeout*/) {}
  // After wait_on_host(): waits until the device has done what the current stream holds. Throws as wait() does.
  virtual void wait_for_device() {}

  // Tells the ranks that wait for this one, as far as the group can, that they wait in vain. Their errors say
  // "rank 1 has <what>", so `what` is what this rank has done. What this rank has in flight on an accelerator is aborted:
  // its streams are free, and its tensors hold anything.
  virtual void announce_failure(const std::string& what = kFailed) noexcept {
    tell("rank " + std::to_string(rank()) + " has " + what);
  }
  // The same with a whole sentence. The first text stays.
  virtual void tell(const std::string& /*text*/) noexcept {}
  // The text that was told, or what is known of a lost rank; empty while all is well.
  virtual std::string trouble() noexcept { return {}; }

  // Ends what is in flight on an accelerator, which tell() cannot.
  virtual void abort() {}

  // Payload bytes this rank has handed to other ranks since construction.
  virtual uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  // Payload bytes that this rank has taken from other ranks since construction.
  virtual uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }

  // Adds bytes that did not go through the group's operations but through memory.
  void count(int64_t sent, int64_t received) {
    bytes_sent_.fetch_add(static_cast<uint64_t>(sent), std::memory_order_relaxed);
    bytes_received_.fetch_add(static_cast<uint64_t>(received), std::memory_order_relaxed);
  }

 protected:
  friend class Route;
  std::shared_ptr<Route> route_;  // what route/ keeps of this group

 private:
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace gossamer
