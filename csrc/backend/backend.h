// The c10d backend "gossamer": shared memory between the ranks of a host (shm/), Gloo between hosts (hosts.h). One
// object for each rank and group. Collectives run one at a time, in the order of the calls (queue.h); send and receive
// have a thread of their own (shm/mailbox.h). It knows nothing of engine and algorithms.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/elsewhere.h"
#include "backend/hosts.h"
#include "backend/queue.h"
#include "backend/types.h"
#include "backend/work.h"
#include "shm/mailbox.h"
#include "shm/symmetric.h"

namespace gossamer {

class GossamerBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Reply = c10::intrusive_ptr<c10d::Work>;

  struct Ranks {
    c10::intrusive_ptr<c10d::Store> store;  // nothing else uses it
    int rank;
    int size;
    std::chrono::milliseconds timeout;
  };
  // Collective. `timeout` limits this constructor, and each operation that is given none. `settings`: what all ranks must
  // have chosen alike, in words; the constructor throws on all of them if they have not.
  GossamerBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                  std::chrono::milliseconds timeout, const std::string& settings = {});
  ~GossamerBackend() override;

  const std::string getBackendName() const override { return "gossamer"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  bool supportsCoalescing() const override { return elsewhere_.type().has_value(); }
  void startCoalescing() override;
  Reply endCoalescing() override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  void abort() override;
  virtual void announce(const std::string& text);  // ends all waits; their errors carry `text`
  void shutdown() override;
  // For a subgroup: what errors call each rank, its number in the parent group. To be called before any operation.
  void name_ranks(std::vector<int> names);
  int name_of(int rank) const { return names_.empty() ? rank : names_.at(static_cast<size_t>(rank)); }

  // Tensors of this device type go to the backend that `connect` makes when the first of them comes: NCCL takes those of
  // CUDA. To be called on all ranks, before any operation. Parts of the group inherit it.
  using ConnectDevice = std::function<c10::intrusive_ptr<Backend>(const Ranks& ranks, at::Device device)>;
  void connect_elsewhere(c10::DeviceType type, ConnectDevice connect);
  // That backend. Throws PythonError(config) for a device that has none.
  c10d::Backend& backend_of(at::Device device);

  // The ranks of each host, which share memory.
  const std::vector<std::vector<int>>& hosts() const { return group_->hosts(); }
  // Bytes of shared memory that the group holds on this host. A page that nobody wrote takes none.
  int64_t memory_bytes() const { return group_->memory_bytes(); }

  // Collective. Returns zero-filled memory that all ranks map. all_reduce needs no copy where every rank passes the same
  // tensor of it. Returns plain memory where the ranks are on several hosts.
  at::Tensor allocate(int64_t bytes);
  // Collective. Called by backend/symmetric_memory.cpp.
  std::shared_ptr<shm::Shared> share(const std::shared_ptr<shm::Block>& block);
  // Why nothing more can come from a rank of this host; empty while the rank is well.
  std::string trouble(int rank) const { return group_->trouble(rank); }
  std::string trouble() const;  // the same for the first rank that has an answer
  // Over several hosts: where kFailed is the reason of the first failure.
  const c10::intrusive_ptr<c10d::Store>& failures() const { return own_store_; }

  Reply broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Reply allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Reply allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Reply allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Reply reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Reply allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Reply _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options) override;
  Reply allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Reply allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) override;
  Reply gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Reply scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  Reply reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  Reply _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override;
  Reply reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options) override;
  Reply alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Reply alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Reply send(Tensors& tensors, int to, int tag) override;
  Reply recv(Tensors& tensors, int from, int tag) override;
  Reply recvAnysource(Tensors& tensors, int tag) override;
  Reply barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 protected:
  // The operations as the queue runs them, blocking. Through shared memory, or through hosts_.
  virtual void all_reduce(const Flat& flat, const shm::Summing& summing, shm::Deadline deadline);
  virtual void all_gather(const Flat& in, const std::vector<void*>& outs, shm::Deadline deadline);
  virtual void reduce_scatter(const std::vector<void*>& ins, const Flat& out, const shm::Summing& summing,
                              shm::Deadline deadline);
  // The ranks compare what they are about to do outside this group's own operations. Throws on all if they differ.
  void agree(const shm::Call& call, shm::Deadline deadline);
  // The same without waiting for ranks of other hosts, if every rank will need data of every other: see Hosts::begin. Returns
  // nothing where all ranks share a host; they have compared the call then.
  std::optional<CallAcross> enter(const shm::Call& call, shm::Deadline deadline);
  // A group of this class for split(). `options` are what its caller gave; may be null.
  virtual c10::intrusive_ptr<GossamerBackend> make_part(const c10::intrusive_ptr<c10d::Store>& store,
                                                        int rank, int size,
                                                        const c10::intrusive_ptr<Options>& options);
  // The backend that takes this tensor; null if it is this one.
  c10d::Backend* elsewhere(const at::Tensor& x);
  c10d::Backend* elsewhere(const Tensors& tensors) {
    return tensors.empty() ? nullptr : elsewhere(tensors[0]);
  }
  bool takes_elsewhere(const at::Tensor& x) const { return elsewhere_.takes(x.device()); }
  // Between startCoalescing() and endCoalescing().
  bool coalesces() const { return coalescing_ != nullptr; }
  void require_usable() const;
  // For a destructor: ends the queue, which calls the functions above. False in a forked child, which owns nothing here.
  bool close();

 private:
  // What every collective gets from its caller.
  struct Plan {
    c10d::OpType type;
    const char* title;  // in profiles, "gossamer:all_reduce"
    std::chrono::milliseconds timeout;
    bool async;
  };
  using Body = std::function<void(shm::Deadline)>;
  // What a work's result() and future hold. By reference: most callers wait, and then no work is made.
  struct Outputs {
    Outputs() = default;
    Outputs(const Tensors& list) : list(&list) {}
    Outputs(const Lists& lists) : lists(&lists) {}
    Lists copy() const { return list ? Lists{*list} : lists ? *lists : Lists(); }
    const Tensors* list = nullptr;
    const Lists* lists = nullptr;
  };

  // Runs `body`, which blocks until the operation is over. It runs in this thread if the caller waits and nothing is queued
  // before it; no work is made then unless it fails. Otherwise the queue runs it. See start.h.
  template <class Run>
  Reply start(const Plan& plan, const Tensors& inputs, Outputs outputs, Run body);
  Reply enqueue(const Plan& plan, const Tensors& inputs, Lists outputs, Body body);
  Reply begun(Reply work);  // for endCoalescing()
  Reply failed(const Plan& plan, const Tensors& inputs, Lists outputs, std::exception_ptr error);
  std::function<void()> aborter();
  // Calls `check`, which checks arguments. If it throws, the other ranks are told, and the call fails.
  template <class Check>
  auto checked(const Plan& plan, Check&& check);
  shm::Deadline deadline_of(std::chrono::milliseconds timeout) const;
  // The first step of a call that does several operations: compares their number between the ranks.
  void agree_on_count(size_t count, shm::Deadline deadline);
  // The coalesced forms with one large tensor for each operation.
  Reply gather_wholes(const Plan& plan, const Tensors& outputs, const Tensors& inputs);
  Reply reduce_wholes(const Plan& plan, const Tensors& outputs, const Tensors& inputs,
                      const c10d::ReduceOp& op);
  void gather_bytes(const void* in, const std::vector<void*>& outs, int64_t bytes, shm::Deadline deadline);
  void compare_settings(const std::string& settings, shm::Deadline deadline);
  void all_to_all(const std::vector<void*>& ins, const std::vector<int64_t>& in_bytes,
                  const std::vector<void*>& outs, const std::vector<int64_t>& out_bytes,
                  shm::Deadline deadline);
  Reply post(Tensors& tensors, int peer, int tag, c10d::OpType type);
  shm::Mailbox& mailbox();
  c10::intrusive_ptr<c10d::Backend> gloo();

  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<int> names_;                     // of the ranks, in errors; empty: their numbers
  c10::intrusive_ptr<c10d::Store> own_store_;  // the part of store_ that no other group uses, now or later
  c10::intrusive_ptr<Options> options_;
  std::unique_ptr<shm::Group> group_;
  std::unique_ptr<Hosts> hosts_;  // none where all ranks share one host
  shm::Windows windows_;
  std::mutex mailbox_mutex_;
  std::unique_ptr<shm::Mailbox> mailbox_;
  bool shut_down_ = false;
  std::mutex gloo_mutex_;                   // held while the ranks meet in the constructor of gloo_
  c10::intrusive_ptr<c10d::Backend> gloo_;  // between hosts, and for sparse tensors
  Elsewhere elsewhere_;
  ConnectDevice connect_device_;
  struct Coalescing {
    std::vector<Reply> works;  // begun since
    bool elsewhere = false;    // the other backend coalesces too
  };
  std::unique_ptr<Coalescing> coalescing_;
  std::atomic<uint64_t> sequence_{0};
  pid_t owner_;
  // What works know of this backend. Not a weak_intrusive_ptr: the last one runs the destructor, and a work may
  // end on the mailbox's thread, which the destructor joins.
  struct Living {
    std::mutex mutex;
    GossamerBackend* backend;
  };
  std::shared_ptr<Living> living_ = std::make_shared<Living>();
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
};

// The backend "gossamer" that the process group of this name uses for CPU tensors.
c10::intrusive_ptr<GossamerBackend> find_backend(const std::string& group_name);

}  // namespace gossamer
