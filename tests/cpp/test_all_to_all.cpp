// all_to_all: every rank holds what each rank had for it, also where parts differ in size or are empty. Sizes that do
// not fit are refused on all ranks.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

// The bytes that one rank sends another in one round, after the table of sizes.
int64_t place_behind_table(const Group& group) {
  const int64_t table = shm::ceil_div(2 * group.size() * 8, shm::kLine) * shm::kLine;
  return place_of_others(group, 1, table);
}

TEST(AllToAll, EqualPartsOfAnySizeArrive) {
  for (const auto setting : settings()) {
    run_threads(setting, [](Group& group) {
      unsigned seed = 0;
      for (const int64_t bytes : sizes_around(place_behind_table(group)))
        check_all_to_all(group, [&](int, int) { return bytes; }, ++seed);
    });
  }
}

void check_uneven_all_to_all(Group& group) {
  const auto sizes = sizes_around(place_behind_table(group));
  for (unsigned seed = 1; seed <= 12; ++seed) {
    check_all_to_all(
        group,
        [&](int from, int to) {
          std::minstd_rand random(seed * 1000 + from * 64 + to);
          random.discard(5);
          return sizes[random() % sizes.size()];
        },
        seed);
  }
}

TEST(AllToAll, UnevenAndEmptyPartsArrive) {
  for (const auto setting : settings()) run_threads(setting, check_uneven_all_to_all);
}

TEST(AllToAll, ProcessesExchangeUnevenPartsToo) {
  for (const auto setting : {Setting{3, true}, Setting{4, false}})
    run_processes(setting, check_uneven_all_to_all);
}

TEST(AllToAll, OneRankMaySendEverythingAndTheOthersNothing) {
  run_threads({4, false}, [](Group& group) {
    const int64_t bytes = 3 * place_behind_table(group) + 1;
    check_all_to_all(group, [&](int from, int to) { return from == 2 && to == 0 ? bytes : 0; }, 1);
    check_all_to_all(group, [&](int from, int to) { return from == to ? bytes : 0; }, 2);
    check_all_to_all(group, [&](int from, int) { return from == 1 ? bytes : 0; }, 3);
    check_all_to_all(group, [](int, int) { return 0; }, 4);
  });
}

TEST(AllToAll, ManyRanksExchange) {
  run_threads({17, false}, [](Group& group) {
    check_all_to_all(group, [](int from, int to) { return from * 100 + to; }, 1);
    check_all_to_all(group, [](int from, int to) { return from == to + 1 ? 70001 : 0; }, 2);
  });
}

TEST(AllToAll, SizesThatDoNotFitAreRefusedOnAllRanksAndTheGroupGoesOn) {
  for (const auto setting : {Setting{2, true}, Setting{3, false}}) {
    run_threads(setting, [](Group& group) {
      const int size = group.size(), own = group.rank();
      Bytes memory(200);
      const std::vector<const void*> ins(size, memory.data());
      const std::vector<void*> outs(size, memory.data() + 100);
      const std::vector<int64_t> in_bytes(size, 8);
      std::vector<int64_t> out_bytes(size, 8);
      if (own == 1) out_bytes[0] = 16;
      const std::string text = message_of(ErrorKind::config, [&] {
        shm::all_to_all(group, ins.data(), in_bytes.data(), outs.data(), out_bytes.data(), in_seconds(kLong));
      });
      expect_in("rank 0 sends 8 bytes to rank 1, which expects 16", text);
      check_all_to_all(group, [](int, int) { return 1000; }, 1);
    });
  }
}

}  // namespace
}  // namespace gossamer::test
