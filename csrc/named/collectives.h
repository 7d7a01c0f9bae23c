// The named operations of one process set. What Python submits goes through negotiate/ to the batch runner; the results
// come back. Owns the negotiation, its transport and the connections. Bound by bindings.cpp; gossamer.comm.named opens it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "named/batch_runner.h"

namespace gossamer::named {

// One call of a user: one tensor, or several that are submitted together.
struct Call {
  negotiate::Collective kind = negotiate::Collective::allreduce;
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;  // one a tensor; empty: it gets a number
  bool in_place = false;           // allreduce, broadcast: the result lands in the tensor
  negotiate::Aggregate op = negotiate::Aggregate::sum;
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
  // other backend with send and recv that carries nothing else. `devices` and `near` carry the data, see BatchRunner. No
  // other process set may use any of them.
  NamedCollectives(c10::intrusive_ptr<c10d::Backend> control, Devices devices, CommunicatorPtr near,
                   negotiate::Options options);
  ~NamedCollectives();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  const BatchRunner& runner() const { return *runner_; }

  // Throws Error(config) for an operation that cannot work on this rank; it then fails on the other ranks too. Throws
  // Error(comm) after the end.
  std::vector<TicketPtr> submit(const Call& call);
  // Operations without tensors: barrier, join, add_process_set (numbers: its ranks), remove_process_set (numbers: its id).
  TicketPtr submit(negotiate::Collective kind, std::vector<int64_t> numbers, const std::string& call_site);
  // A join that this rank must not make. It takes part with zeros, as in any join, and the joins of all ranks fail.
  TicketPtr refuse_join(const std::string& reason, const std::string& call_site);
  void refuse(negotiate::Collective kind, const std::string& name, const std::string& reason,
              const std::string& call_site);

  // Ends the negotiation on all ranks; idempotent.
  void shutdown();
  negotiate::Statistics statistics() const { return negotiator_->statistics(); }

 private:
  negotiate::Operation operation_of(const Call& call, size_t index, const TicketPtr& ticket) const;
  std::string complaint(const Call& call, const at::Tensor& tensor) const;
  TicketPtr submit(negotiate::Request request);

  int rank_;
  std::vector<int> ranks_;
  std::shared_ptr<BatchRunner> runner_;
  std::shared_ptr<negotiate::Negotiator> negotiator_;
};

}  // namespace gossamer::named
