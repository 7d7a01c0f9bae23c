// Reports operations that some ranks submitted and others did not, for too long. Looks at the matching table when rank 0's
// worker thread calls it. It does not see a rank that is slow to execute; the transport's timeout must bound that.
#pragma once

#include <functional>
#include <map>

#include "negotiate/table.h"

namespace gossamer::negotiate {

struct StallOptions {
  double warning_s = 60;  // time until an operation is reported, and between reports; 0: never
  double shutdown_s = 0;  // time until the negotiation ends on all ranks; 0: never
  std::function<void(const std::vector<Stalled>&)> report;  // on rank 0's worker thread; must be short
};

class StallInspector {
 public:
  explicit StallInspector(StallOptions options) : options_(std::move(options)) {}

  // When to look again; Clock::time_point::max() if there is nothing to look at.
  Clock::time_point next(const Table& table) const;
  // Reports; returns why the negotiation must end, or nothing.
  std::string look(const Table& table, Clock::time_point now);

 private:
  StallOptions options_;
  Clock::time_point next_{};
  std::map<std::string, int64_t> rounds_;  // reports so far, of what still waits
};

}  // namespace gossamer::negotiate
