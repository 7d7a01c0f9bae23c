// broadcast: every rank holds what the root had.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

void check_broadcast_sizes(Group& group) {
  unsigned seed = 0;
  for (const int64_t bytes : sizes_around(group.round_bytes())) {
    const int root = static_cast<int>(++seed) % group.size();
    check_broadcast(group, bytes, root, seed);
  }
  check_broadcast(group, shm::kSegmentBytes + 1, 0, ++seed);
  for (int root = 0; root < group.size(); ++root) check_broadcast(group, 999, root, ++seed);
}

TEST(Broadcast, EveryRankHoldsTheRootsBytesWhateverTheSize) {
  for (const auto setting : settings()) run_threads(setting, check_broadcast_sizes);
}

TEST(Broadcast, ProcessesBroadcastToo) {
  for (const auto setting : {Setting{2, true}, Setting{4, false}})
    run_processes(setting, check_broadcast_sizes);
}

// The root waits only for the readers of the round before the last: it must not overtake slow ranks.
TEST(Broadcast, TheRootDoesNotOvertakeSlowReaders) {
  for (const auto setting : {Setting{2, true}, Setting{3, false}}) {
    run_threads(setting, [](Group& group) {
      for (unsigned seed = 0; seed < 40; ++seed) {
        if (group.rank() == group.size() - 1) usleep(1000);
        check_broadcast(group, 20000, 0, seed);
      }
    });
  }
}

}  // namespace
}  // namespace gossamer::test
