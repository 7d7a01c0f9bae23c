// See fusion.h.
#include "negotiate/fusion.h"

#include <algorithm>
#include <tuple>

namespace gossamer::negotiate {
namespace {

bool fusable(const Response& response) {
  const Collective kind = response.request.kind;
  return response.error.empty() && (kind == Collective::allreduce || kind == Collective::allgather ||
                                    kind == Collective::reducescatter);
}

bool alike(const Response& a, const Response& b) {
  const auto key = [](const Response& r) {
    return std::tie(r.request.kind, r.request.op, r.request.element_bytes, r.request.prescale,
                    r.request.postscale, r.request.dtype, r.request.device, r.device_indices);
  };
  return key(a) == key(b);
}

struct Open {
  size_t batch;
  int64_t bytes;
};

}  // namespace

std::vector<std::vector<Agreed>> fuse(std::vector<std::vector<Agreed>> units, const Fusing& fusing) {
  std::vector<std::vector<Agreed>> batches;
  std::vector<Open> open;
  for (auto& unit : units) {
    const bool grouped = unit.size() > 1;
    while (!unit.empty()) {
      // From a group, takes all operations that can run with its first one.
      const Response& first = *unit.front().response;
      const bool fuses = fusable(first);
      const auto rest = std::stable_partition(unit.begin() + 1, unit.end(), [&](const Agreed& other) {
        return fuses && fusable(*other.response) && alike(first, *other.response);
      });
      std::vector<Agreed> part(unit.begin(), rest);
      unit.erase(unit.begin(), rest);
      int64_t bytes = 0;
      for (const Agreed& agreed : part) bytes += agreed.response->bytes;
      const bool joins = fuses && fusing.bytes > 0 && (!grouped || fusing.groups);
      const auto place = std::find_if(open.begin(), open.end(), [&](const Open& other) {
        return joins && other.bytes + bytes <= fusing.bytes &&
               alike(*batches[other.batch].front().response, *part.front().response);
      });
      if (place != open.end()) {
        auto& batch = batches[place->batch];
        batch.insert(batch.end(), part.begin(), part.end());
        place->bytes += bytes;
        continue;
      }
      if (joins && bytes < fusing.bytes) open.push_back({batches.size(), bytes});
      batches.push_back(std::move(part));
    }
  }
  return batches;
}

}  // namespace gossamer::negotiate
