// The root writes, piece by piece, and everyone reads. scatter gives each rank a place of its own. A barrier is a round
// without data. See collectives.h.
#include "shm/collectives.h"
#include "shm/pieces.h"

namespace gossamer::shm {

void broadcast(Group& group, void* data, int64_t bytes, int root, Deadline deadline) {
  group.begin(call_for(CallKind::broadcast, bytes, root), deadline);
  for (int64_t index = 0; index == 0 || index * group.round_bytes() < bytes; ++index) {
    const Range range = piece_of(bytes, group.round_bytes(), index);
    if (group.rank() == root) copy(group.mine(), at(data, range.begin), range.count);
    group.meet();
    if (index == 0) group.compare();
    if (group.rank() != root) copy(at(data, range.begin), group.theirs(root), range.count);
  }
}

void scatter(Group& group, const void* const* ins, void* out, int64_t bytes, int root, Deadline deadline) {
  const int64_t place = round_down(group.round_bytes() / group.size(), kLine);
  group.begin(call_for(CallKind::scatter, bytes, root), deadline);
  for (int64_t index = 0; index == 0 || index * place < bytes; ++index) {
    const Range range = piece_of(bytes, place, index);
    if (group.rank() == root) {
      for (int peer = 0; peer < group.size(); ++peer) {
        uint8_t* to = peer == root ? at(out, range.begin) : group.mine() + peer * place;
        copy(to, at(ins[peer], range.begin), range.count);
      }
    }
    group.meet();
    if (index == 0) group.compare();
    if (group.rank() != root)
      copy(at(out, range.begin), group.theirs(root) + group.rank() * place, range.count);
  }
}

void agree(Group& group, const Call& call, Deadline deadline) {
  group.begin(call, deadline);
  group.meet();
  group.compare();
}

void barrier(Group& group, Deadline deadline) { agree(group, Call(), deadline); }

void agree_on_count(Group& group, int64_t count, Deadline deadline) {
  agree(group, call_for(CallKind::several, count), deadline);
}

}  // namespace gossamer::shm
