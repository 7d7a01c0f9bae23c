// A communicator that knows which of its ranks share a host: all ranks, those of this host, and those that carry the same
// part of a sum from host to host. Its own operations are those of all ranks; route/hosts.h makes sums of the levels.
// "Host" means any island of ranks that are close to each other.
#pragma once

#include <vector>

#include "comm/communicator.h"

namespace gossamer {

class ByHosts : public Communicator {
 public:
  // `inside`: the ranks of this host, in their order. `across`: the ranks with this one's place in every host; null where
  // the smallest host has no rank in this one's place. `hosts`: the ranks of each.
  ByHosts(CommunicatorPtr world, CommunicatorPtr inside, CommunicatorPtr across,
          std::vector<std::vector<int>> hosts);

  int rank() const override { return world_->rank(); }
  int size() const override { return world_->size(); }
  at::Device device() const override { return world_->device(); }

  PendingPtr all_reduce(at::Tensor x, ReduceOp op) override { return world_->all_reduce(std::move(x), op); }
  PendingPtr reduce_scatter(at::Tensor out, at::Tensor x, ReduceOp op) override {
    return world_->reduce_scatter(out, x, op);
  }
  PendingPtr all_gather(at::Tensor out, at::Tensor x) override { return world_->all_gather(out, x); }
  PendingPtr all_to_all(at::Tensor out, at::Tensor x) override { return world_->all_to_all(out, x); }
  PendingPtr all_to_all_unequal(at::Tensor out, at::Tensor x, std::vector<int64_t> out_bytes,
                                std::vector<int64_t> x_bytes) override {
    return world_->all_to_all_unequal(std::move(out), std::move(x), std::move(out_bytes), std::move(x_bytes));
  }
  PendingPtr broadcast(at::Tensor x, int source) override { return world_->broadcast(x, source); }
  PendingPtr exchange(const std::vector<Swap>& swaps) override { return world_->exchange(swaps); }
  bool reduces_every_integer() const override { return world_->reduces_every_integer(); }

  // Memory that the ranks of this host read in each other, where they can.
  at::Tensor allocate(int64_t bytes) override { return inside_->allocate(bytes); }
  ByHosts* by_hosts() override { return this; }
  int64_t chunks() const override { return carriers_ * static_cast<int64_t>(hosts_.size()); }

  std::string capture_refusal() const override;
  // On all levels: what another level has told already, where that is why this rank fails. So it goes from level to level.
  void announce_failure(const std::string& what = kFailed) noexcept override;
  void tell(const std::string& text) noexcept override;
  std::string trouble() noexcept override;
  uint64_t bytes_sent() const override;
  uint64_t bytes_received() const override;
  uint64_t bytes_across() const {
    return across_ ? across_->bytes_sent() : 0;
  }  // sent to other hosts by sums

  const CommunicatorPtr& world() const { return world_; }
  Communicator& inside() const { return *inside_; }
  Communicator* across() const { return across_.get(); }
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int64_t carriers() const {
    return carriers_;
  }  // ranks of each host that carry a part: all of the smallest host
  int64_t largest_host() const { return largest_; }  // its ranks

  // Memory from allocate() of at least so many bytes, for a tensor that does not lie in such; kept. Collective on this host.
  at::Tensor stage(int64_t bytes);

 private:
  CommunicatorPtr world_, inside_, across_;
  std::vector<std::vector<int>> hosts_;
  int64_t carriers_, largest_;
  at::Tensor stage_;
};

}  // namespace gossamer
