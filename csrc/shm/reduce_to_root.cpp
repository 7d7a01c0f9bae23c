// Everyone writes, piece by piece, and the root folds. See collectives.h.
#include <array>

#include "shm/collectives.h"
#include "shm/pieces.h"

namespace gossamer::shm {

void reduce(Group& group, const void* in, void* out, int64_t count, const Summing& summing, int root,
            Deadline deadline) {
  const int size = group.size();
  const int64_t element = element_size(summing.reduction.from);
  const int64_t piece = group.round_bytes() / element;
  group.begin(call_for(CallKind::reduce, count, summing, root), deadline);

  std::array<double, kMaxLocalRanks> factors;
  Fold reduction = summing.reduction;
  for (int64_t index = 0; index == 0 || index * piece < count; ++index) {
    const Range range = piece_of(count, piece, index);
    const void* own = at(in, range.begin * element);
    if (group.rank() != root) copy(group.mine(), own, range.count * element);
    group.meet();
    if (index == 0) {
      group.compare();
      for (int peer = 0; peer < size; ++peer) factors[peer] = group.call_of(peer).factor;
      if (reduction.op == Op::premul_sum) reduction.factors = factors.data();
    }
    if (group.rank() != root) continue;
    std::array<const void*, kMaxLocalRanks> sources;
    for (int peer = 0; peer < size; ++peer) sources[peer] = peer == root ? own : group.theirs(peer);
    void* result = at(out, range.begin * element_size(reduction.to));
    reduce(reduction, sources.data(), size, &result, 1, range.count);
  }
}

}  // namespace gossamer::shm
