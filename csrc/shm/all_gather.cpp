// Every rank writes its part, piece by piece, and reads the parts of the others. gather is the same with one reader. See
// collectives.h.
#include "shm/collectives.h"
#include "shm/pieces.h"

namespace gossamer::shm {
namespace {

void pass_round(Group& group, const Call& call, const void* in, int64_t largest, const int64_t* bytes,
                void* const* outs, Deadline deadline) {
  const int own = group.rank();
  const bool reads = call.root < 0 || call.root == own;
  const bool writes = call.root != own;
  group.begin(call, deadline);
  for (int64_t index = 0; index == 0 || index * group.round_bytes() < largest; ++index) {
    if (writes) {
      const Range range = piece_of(bytes[own], group.round_bytes(), index);
      copy(group.mine(), at(in, range.begin), range.count);
    }
    group.meet();
    if (index == 0) group.compare();
    if (!reads) continue;
    for (int peer = 0; peer < group.size(); ++peer) {
      const Range range = piece_of(bytes[peer], group.round_bytes(), index);
      const void* from = peer == own ? at(in, range.begin) : group.theirs(peer);
      copy(at(outs[peer], range.begin), from, range.count);
    }
  }
}

}  // namespace

void all_gather(Group& group, const void* in, void* const* outs, const int64_t* bytes, Deadline deadline) {
  Call call;
  call.kind = CallKind::all_gather;
  for (int peer = 0; peer < group.size(); ++peer) call.count += bytes[peer];
  pass_round(group, call, in, *std::max_element(bytes, bytes + group.size()), bytes, outs, deadline);
}

void gather(Group& group, const void* in, void* const* outs, int64_t bytes, int root, Deadline deadline) {
  const Call call = call_for(CallKind::gather, bytes, root);
  int64_t equal[kMaxLocalRanks];
  std::fill(equal, equal + group.size(), bytes);
  pass_round(group, call, in, bytes, equal, outs, deadline);
}

}  // namespace gossamer::shm
