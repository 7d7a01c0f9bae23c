// See request.h.
#include "negotiate/request.h"

#include <tuple>

namespace gossamer::negotiate {

const char* name(Collective kind) {
  switch (kind) {
    case Collective::allreduce: return "allreduce";
    case Collective::allgather: return "allgather";
    case Collective::broadcast: return "broadcast";
    case Collective::alltoall: return "alltoall";
    case Collective::reducescatter: return "reducescatter";
    case Collective::barrier: return "barrier";
    case Collective::join: return "join";
    case Collective::add_process_set: return "add_process_set";
    case Collective::remove_process_set: return "remove_process_set";
  }
  return "unknown operation";
}

const char* name(Aggregate op) {
  switch (op) {
    case Aggregate::average: return "average";
    case Aggregate::sum: return "sum";
    case Aggregate::adasum: return "adasum";
    case Aggregate::min: return "min";
    case Aggregate::max: return "max";
    case Aggregate::product: return "product";
  }
  return "unknown reduction";
}

bool same(const Request& a, const Request& b) {
  const auto key = [](const Request& r) {
    return std::tie(r.kind, r.op, r.element_bytes, r.device_index, r.root, r.group_size, r.prescale,
                    r.postscale, r.shape, r.numbers, r.dtype, r.device, r.refusal, r.group, r.name);
  };
  return key(a) == key(b);
}

int64_t element_count(const Request& request) {
  int64_t count = 1;
  for (const int64_t extent : request.shape) count *= extent;
  return count;
}

std::string list(const std::vector<int64_t>& numbers) {
  std::string text = "[";
  for (const int64_t number : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(number);
  return text + "]";
}

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace gossamer::negotiate
