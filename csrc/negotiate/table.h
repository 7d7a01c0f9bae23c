// The matching table: which names wait, and for which ranks. Kept by the coordinator. An operation is complete once every
// rank has submitted it or has joined. A group is complete once all its operations are; they then leave together. Knows
// nothing of the cache except the slot of a bit. Not thread-safe.
#pragma once

#include <set>
#include <unordered_map>

#include "negotiate/check.h"

namespace gossamer::negotiate {

// A complete operation.
struct Matched {
  Requests requests;
  int32_t slot = -1;   // every rank that submitted it sent the bit of this slot
  int64_t value = -1;  // join: the last rank
  std::string error;   // not empty: it cannot run, whatever the requests say
};
using Unit = std::vector<Matched>;  // one operation, or a whole group

struct Stalled {
  std::string name;
  Collective kind;
  double seconds;              // since the first rank submitted it
  std::vector<int> submitted;  // ranks of the whole job
  std::vector<int> missing;
  std::string call_site;  // of the first of those that submitted it
};

class Table {
 public:
  // ranks[r]: the rank in the whole job, for messages.
  explicit Table(std::vector<int> ranks);

  // `slot`: the slot of its bit; -1 if it came in full. Requests of one group come together, before the next take().
  void add(int rank, std::shared_ptr<const Request> request, int32_t slot, Clock::time_point now);
  // The operations that have become complete, in that order.
  std::vector<Unit> take();

  bool empty() const { return waiting_.empty(); }
  std::vector<Stalled> older_than(double seconds, Clock::time_point now) const;

 private:
  struct Waiting {
    Requests requests;
    int present = 0;
    int bits = 0;
    int32_t slot = -1;
    bool ready = false;
    Clock::time_point since;
  };
  struct OperationGroup {
    std::set<std::string> names;
    std::set<int> ranks;
    std::vector<std::string> complete;
    int32_t size = 0;
  };

  void join(int rank, std::shared_ptr<const Request> request);
  void look(const std::string& name, Waiting& waiting);
  bool complete(const Requests& requests) const;
  Matched remove(const std::string& name);
  void take_one(const std::string& name, std::vector<Unit>& units);
  void fail_unlike_groups(std::vector<Unit>& units);
  void expire(int64_t era, std::vector<Unit>& units);
  std::vector<int> ranks_of(const Requests& requests, bool submitted) const;

  std::vector<int> ranks_;
  std::unordered_map<std::string, Waiting> waiting_;
  std::unordered_map<std::string, OperationGroup> groups_;
  std::vector<std::string> ready_;
  std::set<std::string> touched_;  // groups, since the last take()
  std::vector<bool> joined_;
  int joined_count_ = 0;
  int last_joined_ = -1;
  Requests joins_;
};

}  // namespace gossamer::negotiate
