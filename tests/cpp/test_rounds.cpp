// Many operations in a row, in random order and of random sizes, with slow ranks: no rank writes into one of its two
// segments while another still reads it.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

// Operation number `seed` of a random sequence, the same on all ranks.
void run_random(Group& group, unsigned seed, unsigned long draw) {
  const int64_t round = group.round_bytes();
  const int64_t choices[] = {0, 1, 8, 100, 4096, 16384, 20001, round / 4, round - 4, round, round + 4, 70000};
  std::minstd_rand random(static_cast<unsigned>(draw));
  random.discard(3);
  const auto bytes = [&] { return choices[random() % std::size(choices)]; };
  const int root = static_cast<int>(random() % group.size());
  switch (random() % 11) {
    case 0: return check_all_reduce(group, Type::f32, Op::sum, bytes() / 4, seed);
    case 1: return check_all_reduce(group, Type::bf16, Op::avg, bytes() / 2, seed);
    case 2: return check_broadcast(group, bytes(), root, seed);
    case 3: return check_reduce(group, Type::f32, Op::sum, Type::f32, bytes() / 4, root, seed);
    case 4: return check_gather(group, bytes(), root, seed);
    case 5: return check_scatter(group, bytes(), root, seed);
    case 6: return shm::barrier(group, in_seconds(kLong));
    case 7: {
      std::vector<int64_t> sizes;
      for (int peer = 0; peer < group.size(); ++peer) sizes.push_back(bytes());
      return check_all_gather(group, sizes, seed);
    }
    case 8: {
      std::vector<int64_t> counts;
      for (int peer = 0; peer < group.size(); ++peer) counts.push_back(bytes() / 8);
      return check_reduce_scatter(group, Type::f64, Op::sum, Type::f64, counts, seed);
    }
    case 9: {
      std::vector<int64_t> sizes;
      for (int pair = 0; pair < group.size() * group.size(); ++pair) sizes.push_back(bytes());
      return check_all_to_all(group, [&](int from, int to) { return sizes[from * group.size() + to]; }, seed);
    }
    default:  // nobody's memory is touched, and nobody's next operation is disturbed
      if (group.rank() == root) return group.refuse("not today", in_seconds(kLong));
      expect_in("not today", message_of(ErrorKind::config, [&] { shm::barrier(group, in_seconds(kLong)); }));
  }
}

Body sequence(unsigned start, unsigned count) {
  return [=](Group& group) {
    std::mt19937 plan(start), dawdle(start * 64 + static_cast<unsigned>(group.rank()) + 1);
    for (unsigned i = 0; i < count; ++i) {
      if (dawdle() % 16 == 0) usleep(dawdle() % 500);
      run_random(group, start + i, plan());
      if (testing::Test::HasFailure()) return;
    }
  };
}

TEST(Rounds, RandomSequencesLeaveEveryOperationItsResult) {
  constexpr unsigned kOperations = kSanitized ? 60 : 200;
  unsigned start = 0;
  for (const auto setting : settings()) run_threads(setting, sequence(start += 1000, kOperations));
}

TEST(Rounds, RandomSequencesOfProcessesToo) {
  constexpr unsigned kOperations = kSanitized ? 60 : 200;
  unsigned start = 50000;
  for (const auto setting : {Setting{2, true}, Setting{3, false}, Setting{4, true}, Setting{4, false}})
    run_processes(setting, sequence(start += 1000, kOperations));
}

TEST(Rounds, ManyRanksGoThroughThemToo) { run_threads({17, false}, sequence(90000, kSanitized ? 5 : 40)); }

// The smallest operations follow each other closest.
TEST(Rounds, AThousandTinyOperationsDoNotMix) {
  for (const auto setting : {Setting{2, true}, Setting{2, false}, Setting{4, true}, Setting{4, false}}) {
    run_threads(setting, [](Group& group) {
      for (unsigned i = 0; i < (kSanitized ? 200 : 1000); ++i) {
        check_all_reduce(group, Type::i64, Op::sum, 1 + i % 3, i);
        check_broadcast(group, 8, static_cast<int>(i) % group.size(), i);
      }
    });
  }
}

}  // namespace
}  // namespace gossamer::test
