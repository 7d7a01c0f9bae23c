// The named operations of one process set: what Python submits, on its way through negotiate/ to the executor and back.
// Owns the negotiation, its transport and the connections. Bound by bindings.cpp; gossamer.comm.named opens it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "named/executor.h"

namespace gossamer::named {

// One call of a user: one tensor, or several that are submitted together.
struct Call {
  negotiate::Kind kind = negotiate::Kind::allreduce;
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;  // one a tensor; empty: it gets a number
  bool in_place = false;           // allreduce, broadcast: the result lands in the tensor
  negotiate::Reduction op = negotiate::Reduction::sum;
  int root = 0;
  double prescale = 1;
  double postscale = 1;
  std::optional<std::vector<int64_t>> splits;  // alltoall of one tensor: rows to each rank; none: equal parts
  std::optional<std::string> group;            // complete or fail together; empty: it gets a number
  std::string call_site;
};

class NamedCollectives {
 public:
  // Collective over the set. `control` carries the negotiation: a backend "gossamer" whose ranks share one host, or any
  // other with send and recv that carries nothing else. `devices` carry the data; each is the set's alone.
  NamedCollectives(c10::intrusive_ptr<c10d::Backend> control, Devices devices, negotiate::Options options);
  ~NamedCollectives();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }

  // Throws Error(config) for what cannot work on this rank, which then fails on the other ranks too; Error(comm) after
  // the end.
  std::vector<TicketPtr> submit(const Call& call);
  // Without tensors: barrier, join, add_process_set (numbers: its ranks), remove_process_set (numbers: its id).
  TicketPtr submit(negotiate::Kind kind, std::vector<int64_t> numbers, const std::string& call_site);
  void refuse(negotiate::Kind kind, const std::string& name, const std::string& reason,
              const std::string& call_site);

  // Ends the negotiation on all ranks; idempotent.
  void shutdown();
  negotiate::Statistics statistics() const { return negotiator_->statistics(); }

 private:
  negotiate::Operation operation_of(const Call& call, size_t index, const TicketPtr& ticket) const;
  std::string complaint(const Call& call, const at::Tensor& tensor) const;

  int rank_;
  std::vector<int> ranks_;
  std::shared_ptr<Executor> executor_;
  std::shared_ptr<negotiate::Negotiator> negotiator_;
};

}  // namespace gossamer::named
