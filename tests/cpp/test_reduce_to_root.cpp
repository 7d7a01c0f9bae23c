// reduce: the root holds the fold in rank order, bit for bit, and the other ranks' memory stays as it was.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

void check_reduce_to_root_sizes(Group& group, Type type, Op op) {
  unsigned seed = 0;
  for (const int64_t count : sizes_around(group.round_bytes() / shm::element_size(type))) {
    const int root = static_cast<int>(++seed) % group.size();
    check_reduce(group, type, op, type, count, root, seed);
  }
  for (int root = 0; root < group.size(); ++root) check_reduce(group, type, op, type, 1000, root, ++seed);
}

TEST(ReduceToRoot, TheRootHoldsTheFoldWhateverTheSize) {
  for (const auto setting : settings())
    run_threads(setting, [](Group& group) { check_reduce_to_root_sizes(group, Type::f32, Op::sum); });
}

TEST(ReduceToRoot, ProcessesFoldToo) {
  for (const auto setting : {Setting{2, true}, Setting{4, false}})
    run_processes(setting, [](Group& group) { check_reduce_to_root_sizes(group, Type::bf16, Op::avg); });
}

TEST(ReduceToRoot, EveryTypeAndOperationIsFoldedAlike) {
  run_threads({3, true}, [](Group& group) {
    unsigned seed = 0;
    for (int type = 0; type <= static_cast<int>(Type::c128); ++type) {
      for (int op = 0; op <= static_cast<int>(Op::premul_sum); ++op) {
        if (!shm::supports(Type{type}, Op{op})) continue;
        check_reduce(group, Type{type}, Op{op}, Type{type}, 45, 1, ++seed);
      }
    }
  });
}

TEST(ReduceToRoot, SumsMayStopAtTheAccumulatorsAndGoOnFromThem) {
  run_threads({2, false}, [](Group& group) {
    for (const int64_t count : {int64_t{3}, group.round_bytes() / 2 + 1}) {
      check_reduce(group, Type::e4m3fn, Op::sum, Type::f32, count, 0, 1);
      check_reduce(group, Type::f32, Op::sum, Type::e5m2, count, 1, 2);
    }
  });
}

}  // namespace
}  // namespace gossamer::test
