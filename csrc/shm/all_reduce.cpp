// Two-shot all-reduce: rank r folds slice r of every chunk, in rank order, and hands the result to all. Tensors in
// symmetric memory are folded in place. Others pass through the segments, chunk by chunk, with three chunks in flight and
// one meeting for each chunk. See collectives.h.
#include <array>

#include "shm/collectives.h"
#include "shm/pieces.h"

namespace gossamer::shm {
namespace {

using Pointers = std::array<const void*, kMaxLocalRanks>;
using Factors = std::array<double, kMaxLocalRanks>;

// Up to this size every rank folds the whole tensor itself: one meeting instead of two. Meetings cost more where ranks
// have to wake each other.
constexpr int64_t kOneShotBytes = int64_t{16} << 10;
constexpr int64_t kOneShotSleepingBytes = int64_t{64} << 10;

Fold with_factors(const Group& group, const Summing& summing, Factors& factors) {
  Fold reduction = summing.reduction;
  if (reduction.op == Op::premul_sum) {
    for (int peer = 0; peer < group.size(); ++peer) factors[peer] = group.call_of(peer).factor;
    reduction.factors = factors.data();
  }
  return reduction;
}

bool all_in_window(const Group& group, const Window* window) {
  for (int peer = 0; peer < group.size(); ++peer) {
    const Call& call = group.call_of(peer);
    if (!window || call.symmetric != window->id || call.offset != window->offset) return false;
  }
  return true;
}

bool any_in_window(const Group& group) {
  for (int peer = 0; peer < group.size(); ++peer) {
    if (group.call_of(peer).symmetric) return true;
  }
  return false;
}

void in_place(Group& group, const Window& window, int64_t count, const Fold& reduction) {
  const int64_t element = element_size(reduction.from);
  const Range own = slice_of(count, group.size(), group.rank(), element);
  std::array<void*, kMaxLocalRanks> slices;
  for (int peer = 0; peer < group.size(); ++peer) slices[peer] = at(window.peers[peer], own.begin * element);
  reduce(reduction, slices.data(), group.size(), slices.data(), group.size(), own.count);
  group.meet();
}

void fold_whole(Group& group, void* data, int64_t count, const Fold& reduction) {
  Pointers sources;
  for (int peer = 0; peer < group.size(); ++peer) {
    sources[peer] = peer == group.rank() ? data : group.theirs(peer);
  }
  reduce(reduction, sources.data(), group.size(), &data, 1, count);
}

// A segment has a place for each rank's slice of a chunk. In one round the other ranks' places hold this rank's input for
// their slices, and its own place holds its result of the chunk before.
class Chunks {
 public:
  Chunks(Group& group, void* data, int64_t count, Type type)
      : group_(group),
        data_(data),
        count_(count),
        element_(element_size(type)),
        place_(round_down(group.round_bytes() / group.size(), kLine)),
        chunk_(place_ * group.size() / element_),
        total_(ceil_div(count, chunk_)) {}

  int64_t total() const { return total_; }

  void write_input(int64_t index) {
    if (index >= total_) return;
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer == group_.rank()) continue;
      const Range slice = slice_bytes(index, peer);
      copy(group_.mine() + peer * place_, user(index, slice), slice.count);
    }
  }

  void fold(int64_t index, const Fold& reduction) {
    if (index < 0 || index >= total_) return;
    const int64_t own_place = group_.rank() * place_;
    const Range slice = slice_bytes(index, group_.rank());
    Pointers sources;
    for (int peer = 0; peer < group_.size(); ++peer) {
      sources[peer] = peer == group_.rank() ? user(index, slice) : group_.theirs(peer) + own_place;
    }
    void* outs[] = {user(index, slice), group_.mine() + own_place};
    reduce(reduction, sources.data(), group_.size(), outs, 2, slice.count / element_);
  }

  void read_result(int64_t index) {
    if (index < 0 || index >= total_) return;
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer == group_.rank()) continue;
      const Range slice = slice_bytes(index, peer);
      copy(user(index, slice), group_.theirs(peer) + peer * place_, slice.count);
    }
  }

 private:
  // In bytes, from the beginning of the chunk.
  Range slice_bytes(int64_t index, int peer) const {
    const Range slice = slice_of(piece_of(count_, chunk_, index).count, group_.size(), peer, element_);
    return {slice.begin * element_, slice.count * element_};
  }
  void* user(int64_t index, Range slice) const { return at(data_, index * chunk_ * element_ + slice.begin); }

  Group& group_;
  void* data_;
  int64_t count_;
  int64_t element_;
  int64_t place_;  // bytes
  int64_t chunk_;  // elements
  int64_t total_;
};

}  // namespace

void all_reduce(Group& group, void* data, int64_t count, const Summing& summing, const Window* window,
                Deadline deadline) {
  Call call = call_for(CallKind::all_reduce, count, summing);
  const int64_t bytes = count * element_size(summing.reduction.from);
  const bool whole = bytes <= (group.may_spin() ? kOneShotBytes : kOneShotSleepingBytes);
  if (whole) window = nullptr;  // one meeting and a small copy cost less than two meetings
  if (window) {
    call.symmetric = window->id;
    call.offset = window->offset;
  }
  group.begin(call, deadline);

  Chunks chunks(group, data, count, summing.reduction.from);
  const auto write_first = [&] { whole ? copy(group.mine(), data, bytes) : chunks.write_input(0); };
  if (!window) write_first();
  group.meet();
  group.compare();
  Factors factors;
  const Fold reduction = with_factors(group, summing, factors);
  if (any_in_window(group)) {
    if (all_in_window(group, window)) return in_place(group, *window, count, reduction);
    write_first();  // the tensors of some ranks are not in symmetric memory
    group.meet();
  }
  if (whole) return fold_whole(group, data, count, reduction);
  for (int64_t index = 0; index <= chunks.total(); ++index) {
    chunks.write_input(index + 1);
    chunks.fold(index, reduction);
    chunks.read_result(index - 1);
    if (index < chunks.total()) group.meet();
  }
}

}  // namespace gossamer::shm
