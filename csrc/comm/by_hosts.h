// A communicator that knows which of its ranks share a host. It has three levels: all ranks; the ranks of this host; and
// the ranks that carry the same part of a sum from host to host. Its own operations are those of all ranks; route/hosts.h
// makes sums of the levels. "Host" means any island of ranks that are close to each other.
#pragma once

#include <vector>

#include "comm/forwarding.h"

namespace gossamer {

class ByHosts : public Forwarding {
 public:
  // `inside`: the ranks of this host, in their order. `across`: the ranks with this rank's place in every host; null where
  // the smallest host has no such place. `hosts`: the ranks of each host. `back`: connections of their own for results on
  // their way back inside the host, so that sums may overlap; null if sums come one after the other.
  ByHosts(CommunicatorPtr world, CommunicatorPtr inside, CommunicatorPtr across,
          std::vector<std::vector<int>> hosts, CommunicatorPtr back = nullptr);

  // Memory that the ranks of this host read in each other, where the host's communicator has such memory.
  at::Tensor allocate(int64_t bytes) override { return inside_->allocate(bytes); }
  ByHosts* by_hosts() override { return this; }
  bool overlaps_sums() const override { return back_ != nullptr && queues_on_device(); }
  int64_t chunks() const override { return carriers_ * static_cast<int64_t>(hosts_.size()); }

  // Of its sums. The ranks inside a host have compared the call, if they share memory.
  bool takes_calls() const override {
    return inside_->shares_memory() && (across_ == nullptr || across_->takes_calls());
  }
  void set_call(CallAcross* call) override;
  // The ranks of this host have met at the end of a sum. Throws CallsDiffer if one of them has.
  void end_call();
  void set_timeout(std::chrono::milliseconds timeout) override;
  std::string capture_refusal() const override;
  // Tells all levels. If another level already knows the reason of this failure, that reason is told: so it spreads.
  void announce_failure(const std::string& what = kFailed) noexcept override;
  void tell(const std::string& text) noexcept override;
  std::string trouble() noexcept override;
  void abort() override;
  uint64_t bytes_sent() const override;
  uint64_t bytes_received() const override;
  // Bytes that sums have sent to other hosts.
  uint64_t bytes_across() const { return across_ ? across_->bytes_sent() : 0; }

  const CommunicatorPtr& world() const { return other_; }
  Communicator& inside() const { return *inside_; }
  Communicator& back() const { return back_ ? *back_ : *inside_; }
  Communicator* across() const { return across_.get(); }
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  // The ranks of each host that carry a part: as many as the smallest host has.
  int64_t carriers() const { return carriers_; }
  int64_t largest_host() const { return largest_; }  // its ranks

 private:
  std::vector<Communicator*> levels() const;

  CommunicatorPtr inside_, across_, back_;
  std::vector<std::vector<int>> hosts_;
  int64_t carriers_, largest_;
  CallAcross* call_ = nullptr;
};

}  // namespace gossamer
