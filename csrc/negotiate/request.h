// What ranks negotiate about. A request is one rank's wish for one named operation; a response is what all ranks agreed
// on. Plain data; ranks are those of the process set, counted from 0. No torch: dtypes and devices are names, which errors
// show. Used by every file of this folder, and by the executor that runs what was agreed.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"

namespace gossamer::negotiate {

using Clock = std::chrono::steady_clock;

enum class Collective : uint8_t {
  allreduce,
  allgather,
  broadcast,
  alltoall,
  reducescatter,
  barrier,
  join,
  add_process_set,
  remove_process_set,
};
enum class Aggregate : uint8_t { average = 0, sum, adasum, min, max, product };  // Horovod's numbers

const char* name(Collective kind);
const char* name(Aggregate op);
// Whether the executor runs it: operations on tensors. The others are over once they are agreed on.
inline bool moves_data(Collective kind) { return kind < Collective::barrier; }

struct Request {
  Collective kind = Collective::allreduce;
  Aggregate op = Aggregate::sum;
  int32_t element_bytes = 0;
  int32_t device_index = 0;  // may differ between ranks
  int32_t root = 0;          // broadcast: rank in the set
  int32_t group_size = 0;    // operations in `group`; 0: in none
  int64_t era = -1;  // unnamed operations: barriers and joins submitted before; -1: the user gave the name
  double prescale = 1;
  double postscale = 1;
  std::string name;
  std::string dtype;
  std::string device;  // type alone: "cpu", "cuda"
  std::string group;
  std::string call_site;  // where the user called, for errors
  std::string refusal;    // why this rank cannot take part; then the operation fails on all ranks
  std::vector<int64_t> shape;
  // alltoall: splits, one for each rank; add_process_set: its ranks; remove_process_set: its id.
  std::vector<int64_t> numbers;
};

// Whether an agreement on `a` is valid for `b`: everything but the call sites is equal.
bool same(const Request& a, const Request& b);

int64_t element_count(const Request& request);

struct Response {
  Request request;             // of the lowest rank that submitted it, with that rank's own sizes
  std::vector<int64_t> sizes;  // allgather: dimension 0 of each rank; alltoall: splits, [from * size + to]
  std::vector<int32_t> device_indices;  // of each rank; -1: joined
  int64_t value = -1;                   // join: the last rank to join; add_process_set: the new id
  int64_t bytes = 0;                    // of the result before scattering, what fusion counts
  int32_t slot = -1;                    // cached there from now on; with an error: its occupant is dropped
  std::string error;                    // not empty: it failed on every rank
};

// What happened to an operation on this rank.
struct Result {
  std::shared_ptr<const Response> response;  // null where the negotiation ended before an agreement
  ErrorKind kind = ErrorKind::config;        // config: this operation alone; comm: the negotiation has ended
  std::string error;                         // empty: done
};

std::string list(const std::vector<int64_t>& numbers);  // "[2, 3]"
std::string name_ranks(const std::vector<int>& ranks);  // "rank 2", "ranks 0, 3"

}  // namespace gossamer::negotiate
