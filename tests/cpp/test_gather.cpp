// gather: the root holds what each rank had. The others pass no memory for it.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

void check_gather_sizes(Group& group) {
  unsigned seed = 0;
  for (const int64_t bytes : sizes_around(group.round_bytes())) {
    const int root = static_cast<int>(++seed) % group.size();
    check_gather(group, bytes, root, seed);
  }
  for (int root = 0; root < group.size(); ++root) check_gather(group, 999, root, ++seed);
}

TEST(Gather, TheRootHoldsEveryPartWhateverTheSize) {
  for (const auto setting : settings()) run_threads(setting, check_gather_sizes);
}

TEST(Gather, ProcessesGatherToo) {
  for (const auto setting : {Setting{2, true}, Setting{3, false}}) run_processes(setting, check_gather_sizes);
}

}  // namespace
}  // namespace gossamer::test
