// Tells of operations that some ranks have submitted and others not, for too long. Looks at the matching table when rank
// 0's worker thread asks it to; says nothing about a rank that is slow to execute, which the transport has to bound.
#pragma once

#include <functional>
#include <map>

#include "negotiate/table.h"

namespace gossamer::negotiate {

struct StallOptions {
  double warning_s = 60;  // an operation is reported after these, and again after as many more; 0: never
  double shutdown_s = 0;  // the negotiation ends on all ranks after these; 0: never
  std::function<void(const std::vector<Stalled>&)> report;  // on rank 0's worker thread; must be short
};

class StallInspector {
 public:
  explicit StallInspector(StallOptions options) : options_(std::move(options)) {}

  // When to look again; the end of time if there is nothing to look at.
  Clock::time_point next(const Table& table) const;
  // Reports; returns why the negotiation must end, or nothing.
  std::string look(const Table& table, Clock::time_point now);

 private:
  StallOptions options_;
  Clock::time_point next_{};
  std::map<std::string, int64_t> rounds_;  // reports so far, of what still waits
};

}  // namespace gossamer::negotiate
