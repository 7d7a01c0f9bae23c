// Every rank hands over its input for the slices of the others, piece by piece, and folds its own. See collectives.h.
#include <array>
#include <numeric>

#include "shm/collectives.h"
#include "shm/pieces.h"

namespace gossamer::shm {

void reduce_scatter(Group& group, const void* const* ins, void* out, const int64_t* counts,
                    const Summing& summing, Deadline deadline) {
  const int size = group.size();
  const int own = group.rank();
  const int64_t element = element_size(summing.reduction.from);
  const int64_t place = round_down(group.round_bytes() / std::max(1, size - 1), kLine);
  const int64_t piece = place / element;
  const int64_t total = std::accumulate(counts, counts + size, int64_t{0});
  group.begin(call_for(CallKind::reduce_scatter, total, summing), deadline);

  const int64_t largest = *std::max_element(counts, counts + size);
  std::array<double, kMaxLocalRanks> factors;
  Fold reduction = summing.reduction;
  for (int64_t index = 0; index == 0 || index * piece < largest; ++index) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == own) continue;
      const Range range = piece_of(counts[peer], piece, index);
      copy(group.mine() + place_for(peer, own) * place, at(ins[peer], range.begin * element),
           range.count * element);
    }
    group.meet();
    if (index == 0) {
      group.compare();
      for (int peer = 0; peer < size; ++peer) factors[peer] = group.call_of(peer).factor;
      if (reduction.op == Op::premul_sum) reduction.factors = factors.data();
    }
    const Range range = piece_of(counts[own], piece, index);
    std::array<const void*, kMaxLocalRanks> sources;
    for (int peer = 0; peer < size; ++peer) {
      sources[peer] = peer == own ? at(ins[own], range.begin * element)
                                  : group.theirs(peer) + place_for(own, peer) * place;
    }
    void* result = at(out, range.begin * element_size(reduction.to));
    reduce(reduction, sources.data(), size, &result, 1, range.count);
  }
}

}  // namespace gossamer::shm
