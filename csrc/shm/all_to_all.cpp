// Every rank writes a piece for each other rank and reads the pieces for itself, round by round, until the largest part is
// through. Parts may differ in size: the bytes that each rank sends and expects stand before the pieces. See collectives.h.
#include "base/check.h"
#include "shm/collectives.h"
#include "shm/pieces.h"

namespace gossamer::shm {
namespace {

// The table at the start of a segment: int64 bytes sent to each rank, then bytes expected from each.
int64_t table_bytes(int size) { return ceil_div(2 * size * 8, kLine) * kLine; }

int64_t entry(const uint8_t* segment, int index) {
  int64_t value;
  std::memcpy(&value, segment + index * 8, 8);
  return value;
}

}  // namespace

int64_t compare_splits(int size, const std::function<int(int)>& global_rank,
                       const std::function<int64_t(int, int)>& entry) {
  int64_t largest = 0;
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const int64_t sent = entry(from, to);
      const int64_t expected = entry(to, size + from);
      GOSSAMER_CHECK(sent == expected, ErrorKind::config, "all_to_all: rank ", global_rank(from), " sends ",
                     sent, " bytes to rank ", global_rank(to), ", which expects ", expected);
      largest = std::max(largest, sent);
    }
  }
  return largest;
}

void all_to_all(Group& group, const void* const* ins, const int64_t* in_bytes, void* const* outs,
                const int64_t* out_bytes, Deadline deadline) {
  const int size = group.size();
  const int own = group.rank();
  const int64_t table = table_bytes(size);
  const int64_t place = round_down((group.round_bytes() - table) / std::max(1, size - 1), kLine);
  group.begin(call_for(CallKind::all_to_all, 0), deadline);
  std::memcpy(group.mine(), in_bytes, static_cast<size_t>(size) * 8);
  std::memcpy(group.mine() + size * 8, out_bytes, static_cast<size_t>(size) * 8);
  int64_t largest = 0;
  for (int64_t index = 0; index == 0 || index * place < largest; ++index) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == own) continue;
      const Range range = piece_of(in_bytes[peer], place, index);
      copy(group.mine() + table + place_for(peer, own) * place, at(ins[peer], range.begin), range.count);
    }
    group.meet();
    if (index == 0) {
      group.compare();
      largest = compare_splits(
          size, [&](int peer) { return group.global_rank(peer); },
          [&](int peer, int index) { return entry(group.theirs(peer), index); });
      copy(outs[own], ins[own], in_bytes[own]);
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer == own) continue;
      const Range range = piece_of(out_bytes[peer], place, index);
      copy(at(outs[peer], range.begin), group.theirs(peer) + table + place_for(own, peer) * place,
           range.count);
    }
  }
}

}  // namespace gossamer::shm
