// The encoded operations of a group between tensors of an accelerator. They run on a stream of their own, behind what the
// caller's stream holds when they are called; so the host queues them and waits for nothing. Used by backend.cpp.
#pragma once

#include <c10/core/Stream.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "encoded/options.h"
#include "route/scratch.h"

namespace gossamer {

class OnDevice {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Reply = c10::intrusive_ptr<c10d::Work>;

  // `comm`: connections on the device that nothing else uses.
  OnDevice(CommunicatorPtr comm, CodecOptions options);

  struct Call {
    c10d::OpType type;
    const char* title;  // in profiles
    bool async;
    Tensors inputs;
    std::vector<Tensors> outputs;  // what the work's future holds
  };
  // Runs `queue`, which queues operations by the functions below, with the group's stream as the current one. async: the
  // returned work's wait() lets the current stream wait. Otherwise the caller's stream waits already, and no work is made.
  Reply run(const Call& call, const std::function<void()>& queue);

  // x becomes the sum, in place; out this rank's part of the sum of `parts`; outs every rank's x. `parts` and `outs` are one
  // tensor a rank, or one tensor for all.
  void all_reduce(const at::Tensor& x, const c10d::ReduceOp& op);
  void reduce_scatter(const at::Tensor& out, const Tensors& parts, const c10d::ReduceOp& op);
  void all_gather(const Tensors& outs, const at::Tensor& x);

  const CommunicatorPtr& comm() const { return comm_; }

 private:
  double scale_of(const c10d::ReduceOp& op) const;

  CommunicatorPtr comm_;
  CodecOptions options_;
  at::Device device_;
  c10::Stream stream_;
  std::mutex mutex_;    // held while an operation is queued
  Scratch scratch_;     // allocated and used on stream_ alone
  uint64_t calls_ = 0;  // the nonce of stochastic codecs
};

}  // namespace gossamer
