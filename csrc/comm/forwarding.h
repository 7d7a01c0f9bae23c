// A communicator made of another one, whose ranks and operations it has. Derived classes add memory that ranks read in
// each other, or levels.
#pragma once

#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace gossamer {

class Forwarding : public Communicator {
 public:
  explicit Forwarding(CommunicatorPtr other) : other_(std::move(other)) {}

  int rank() const override { return other_->rank(); }
  int size() const override { return other_->size(); }
  at::Device device() const override { return other_->device(); }

  PendingPtr all_reduce(at::Tensor x, ReduceOp op) override { return other_->all_reduce(x, op); }
  PendingPtr reduce_scatter(at::Tensor out, at::Tensor x, ReduceOp op) override {
    return other_->reduce_scatter(out, x, op);
  }
  PendingPtr all_gather(at::Tensor out, at::Tensor x) override { return other_->all_gather(out, x); }
  PendingPtr all_to_all(at::Tensor out, at::Tensor x) override { return other_->all_to_all(out, x); }
  PendingPtr all_to_all_unequal(at::Tensor out, at::Tensor x, std::vector<int64_t> out_bytes,
                                std::vector<int64_t> x_bytes) override {
    return other_->all_to_all_unequal(std::move(out), std::move(x), std::move(out_bytes), std::move(x_bytes));
  }
  PendingPtr broadcast(at::Tensor x, int source) override { return other_->broadcast(x, source); }
  PendingPtr exchange(const std::vector<Swap>& swaps) override { return other_->exchange(swaps); }
  void set_timeout(std::chrono::milliseconds timeout) override { other_->set_timeout(timeout); }
  void abort() override { other_->abort(); }
  bool queues_on_device() const override { return other_->queues_on_device(); }
  bool reduces_every_integer() const override { return other_->reduces_every_integer(); }

 protected:
  CommunicatorPtr other_;
};

}  // namespace gossamer
