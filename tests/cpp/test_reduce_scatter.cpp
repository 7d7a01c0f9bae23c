// reduce_scatter: every rank holds the fold of the ranks' inputs for it, in rank order and bit for bit, also where the parts
// differ in size.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

TEST(ReduceScatter, EqualPartsOfAnySizeAreFolded) {
  for (const auto setting : settings()) {
    run_threads(setting, [](Group& group) {
      unsigned seed = 0;
      for (const int64_t count : sizes_around(place_of_others(group, 4))) {
        const std::vector<int64_t> counts(group.size(), count);
        check_reduce_scatter(group, Type::f32, Op::sum, Type::f32, counts, ++seed);
      }
    });
  }
}

// One rank's part may need one round and another's several; one may be empty.
void check_uneven(Group& group, Type type, Op op) {
  const auto sizes = sizes_around(place_of_others(group, shm::element_size(type)));
  std::mt19937 random(41);
  for (unsigned seed = 1; seed <= 12; ++seed) {
    std::vector<int64_t> counts;
    for (int peer = 0; peer < group.size(); ++peer) counts.push_back(sizes[random() % sizes.size()]);
    check_reduce_scatter(group, type, op, type, counts, seed);
  }
}

TEST(ReduceScatter, UnevenAndEmptyPartsAreFolded) {
  for (const auto setting : settings())
    run_threads(setting, [](Group& group) { check_uneven(group, Type::f32, Op::avg); });
}

TEST(ReduceScatter, ProcessesFoldUnevenPartsToo) {
  for (const auto setting : {Setting{3, true}, Setting{4, false}})
    run_processes(setting, [](Group& group) { check_uneven(group, Type::f16, Op::premul_sum); });
}

TEST(ReduceScatter, SumsMayStopAtTheAccumulatorsAndGoOnFromThem) {
  run_threads({3, false}, [](Group& group) {
    const std::vector<int64_t> counts = {5, 0, place_of_others(group, 4) + 3};
    check_reduce_scatter(group, Type::bf16, Op::sum, Type::f32, counts, 1);
    check_reduce_scatter(group, Type::f32, Op::avg, Type::bf16, counts, 2);
    check_reduce_scatter(group, Type::c32, Op::sum, Type::c64, counts, 3);
  });
}

TEST(ReduceScatter, EveryTypeAndOperationIsFoldedAlike) {
  run_threads({3, true}, [](Group& group) {
    unsigned seed = 0;
    for (int type = 0; type <= static_cast<int>(Type::c128); ++type) {
      for (int op = 0; op <= static_cast<int>(Op::premul_sum); ++op) {
        if (!shm::supports(Type{type}, Op{op})) continue;
        check_reduce_scatter(group, Type{type}, Op{op}, Type{type}, {19, 1, 33}, ++seed);
      }
    }
  });
}

}  // namespace
}  // namespace gossamer::test
