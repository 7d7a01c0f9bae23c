// The state of rank 0: the matching table, the slots of the cache, and how both become decisions. It has no thread and no
// transport; negotiator.cpp calls it on the worker thread of rank 0.
#pragma once

#include <optional>

#include "negotiate/cache.h"
#include "negotiate/fusion.h"
#include "negotiate/table.h"
#include "negotiate/wire.h"

namespace gossamer::negotiate {

class Coordinator {
 public:
  Coordinator(std::vector<int> ranks, const Fusing& fusing, int cache_capacity);

  // Throws Error(comm) if `submission` cannot come from a rank of the same version.
  void take(int rank, Submission submission, Clock::time_point now);
  // What every rank is to do next; nothing if no operation is complete.
  std::optional<Decision> decide();

  const Table& table() const { return table_; }

 private:
  Agreed settle(Matched matched);

  std::vector<int> ranks_;
  Fusing fusing_;
  int capacity_;
  Table table_;
  Slots slots_;
  uint64_t sequence_ = 0;         // of the last decision
  int64_t next_process_set_ = 1;  // 0 is the set of all ranks
};

}  // namespace gossamer::negotiate
