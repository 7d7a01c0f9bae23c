// all_gather: every rank holds what each rank had, also where the sizes differ.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

TEST(AllGather, EveryRankHoldsEqualPartsOfAnySize) {
  for (const auto setting : settings()) {
    run_threads(setting, [](Group& group) {
      unsigned seed = 0;
      for (const int64_t bytes : sizes_around(group.round_bytes()))
        check_all_gather(group, std::vector<int64_t>(group.size(), bytes), ++seed);
    });
  }
}

void check_uneven(Group& group) {
  const auto sizes = sizes_around(group.round_bytes());
  std::mt19937 random(7);
  for (unsigned seed = 1; seed <= 12; ++seed) {
    std::vector<int64_t> bytes;
    for (int peer = 0; peer < group.size(); ++peer) bytes.push_back(sizes[random() % sizes.size()]);
    check_all_gather(group, bytes, seed);
  }
}

TEST(AllGather, UnevenAndEmptyPartsAreGathered) {
  for (const auto setting : settings()) run_threads(setting, check_uneven);
}

TEST(AllGather, ProcessesGatherUnevenPartsToo) {
  for (const auto setting : {Setting{2, true}, Setting{4, false}}) run_processes(setting, check_uneven);
}

}  // namespace
}  // namespace gossamer::test
