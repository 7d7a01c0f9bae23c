// The backend "gossamer" with a codec: sums and gathers of floats go through the two-shot collectives, over connections of
// their own; everything else is GossamerBackend's. Whatever calls c10d is compressed by it: DDP, FSDP2, tensor parallelism.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "encoded/on_device.h"
#include "encoded/options.h"
#include "route/scratch.h"

namespace gossamer {

class CodecBackend : public GossamerBackend {
 public:
  // Makes the connections that encoded rows of tensors on `device` travel on. Collective.
  using Connect =
      std::function<CommunicatorPtr(const Ranks& ranks, const CodecOptions& options, at::Device device)>;

  CodecBackend(const Ranks& ranks, const c10::intrusive_ptr<CodecOptions>& options, Connect connect);
  ~CodecBackend() override;

  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void announce(const std::string& text) override;

  // Sums and gathers of an accelerator's tensors: see on_device.h. All other operations are the base's.
  Reply allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Reply allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Reply reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  Reply _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override;
  Reply reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options) override;
  Reply allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Reply _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options) override;
  Reply allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) override;
  Reply endCoalescing() override;
  void abort() override;
  void shutdown() override;

  // The connections of encoded rows, with their counters of bytes. Those of an accelerator are null until they are needed.
  const CommunicatorPtr& comm() const { return comm_; }
  CommunicatorPtr device_comm();

 protected:
  void all_reduce(const Flat& flat, const shm::Summing& summing, shm::Deadline deadline) override;
  void all_gather(const Flat& in, const std::vector<void*>& outs, shm::Deadline deadline) override;
  void reduce_scatter(const std::vector<void*>& ins, const Flat& out, const shm::Summing& summing,
                      shm::Deadline deadline) override;
  // The part has the codecs of `options` if these are CodecOptions, else this group's.
  c10::intrusive_ptr<GossamerBackend> make_part(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                int size,
                                                const c10::intrusive_ptr<Options>& options) override;

 private:
  // Whether a tensor of this type and size goes through a codec.
  bool encodes(const std::optional<CodecChoice>& codec, const Flat& x, int64_t bytes) const;
  bool encodes(const shm::Summing& summing, const Flat& x, int64_t bytes) const;
  // The same for an accelerator's tensors. `whole`: one tensor of a part for each rank, or one for all.
  bool encodes(const std::optional<CodecChoice>& codec, const at::Tensor& x, int64_t bytes) const;
  bool encodes(const c10d::ReduceOp& op, const at::Tensor& x) const;
  bool encodes(const c10d::ReduceOp& op, const Tensors& whole, const at::Tensor& part) const;
  bool gathers_encoded(const Tensors& whole, const at::Tensor& part) const;
  struct Chosen {
    Tensors outputs, inputs, exact_outputs, exact_inputs;
  };
  template <class Encoded>
  static Chosen choose(const Tensors& outputs, const Tensors& inputs, Encoded&& encoded);
  // Runs `step` on the group's stream, or in endCoalescing().
  using Step = std::function<void(OnDevice&)>;
  Reply run_on_device(OnDevice::Call call, at::Device device, Step step);
  OnDevice& on_device(at::Device device);
  Communicator& one_level() const;  // between all ranks directly
  // Runs an encoded operation through `comm`. All ranks find out in the group itself whether they do the same: before it, or
  // during it by the messages between hosts.
  template <class Run>
  void run(Communicator& comm, const shm::Call& call, shm::Deadline deadline, Run&& run);

  c10::intrusive_ptr<CodecOptions> options_;
  Connect connect_;
  CommunicatorPtr comm_;
  Scratch scratch_;
  uint64_t calls_ = 0;  // encoded ones: the nonce of stochastic codecs
  Ranks ranks_;
  std::mutex on_device_mutex_;
  std::unique_ptr<OnDevice> on_device_;
  bool ended_ = false;  // by shutdown()
  struct Postponed {
    OnDevice::Call call;
    at::Device device;
    std::vector<Step> steps;
  };
  std::optional<Postponed> postponed_;  // to endCoalescing()
};

}  // namespace gossamer
