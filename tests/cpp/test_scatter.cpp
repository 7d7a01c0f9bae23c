// scatter: every rank holds what the root had for it. The others pass no memory for it.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

void check_scatter_sizes(Group& group) {
  unsigned seed = 0;
  for (const int64_t bytes : sizes_around(place_of(group, 1))) {
    const int root = static_cast<int>(++seed) % group.size();
    check_scatter(group, bytes, root, seed);
  }
  check_scatter(group, shm::kSegmentBytes + 1, 0, ++seed);
  for (int root = 0; root < group.size(); ++root) check_scatter(group, 999, root, ++seed);
}

TEST(Scatter, EveryRankHoldsItsPartWhateverTheSize) {
  for (const auto setting : settings()) run_threads(setting, check_scatter_sizes);
}

TEST(Scatter, ProcessesScatterToo) {
  for (const auto setting : {Setting{2, true}, Setting{3, false}})
    run_processes(setting, check_scatter_sizes);
}

}  // namespace
}  // namespace gossamer::test
