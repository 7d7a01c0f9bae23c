// all_reduce: every rank holds the fold in rank order, bit for bit, whichever way a call takes: folded whole, in chunks
// through the segments, or in place in symmetric memory.
#include <gtest/gtest.h>

#include "shm/symmetric.h"
#include "shm_collectives.h"

namespace gossamer::test {
namespace {

// Around the largest tensors that are folded whole, the chunks, and the slices of a chunk.
std::vector<int64_t> sizes(const Group& group, int64_t element_bytes) {
  const int64_t chunk = place_of(group, element_bytes) * group.size(), line = shm::kLine / element_bytes;
  std::vector<int64_t> sizes = sizes_around(chunk);
  for (const int64_t whole : {int64_t{16} << 10, int64_t{64} << 10})
    for (const int64_t more : {-1, 0, 1}) sizes.push_back(whole / element_bytes + more);
  for (const int64_t more : {line - 1, line, line + 1, line * group.size() + 1})
    sizes.push_back(chunk + more);
  return sizes;
}

TEST(AllReduce, EveryRankHoldsTheFoldInRankOrderWhateverTheSize) {
  for (const auto setting : settings()) {
    run_threads(setting, [](Group& group) {
      unsigned seed = 0;
      for (const int64_t count : sizes(group, 4)) check_all_reduce(group, Type::f32, Op::sum, count, ++seed);
      for (const int64_t count : sizes(group, 1)) check_all_reduce(group, Type::i8, Op::max, count, ++seed);
    });
  }
}

TEST(AllReduce, EveryTypeAndOperationIsFoldedAlike) {
  for (const Setting setting : {Setting{2, true}, Setting{3, false}}) {
    run_threads(setting, [](Group& group) {
      unsigned seed = 0;
      for (int type = 0; type <= static_cast<int>(Type::c128); ++type) {
        for (int op = 0; op <= static_cast<int>(Op::premul_sum); ++op) {
          if (!shm::supports(Type{type}, Op{op})) continue;
          check_all_reduce(group, Type{type}, Op{op}, 37, ++seed);
          check_all_reduce(group, Type{type}, Op{op}, 70001 / shm::element_size(Type{type}), ++seed);
        }
      }
    });
  }
}

TEST(AllReduce, ProcessesHoldTheFoldToo) {
  for (const auto setting : {Setting{2, true}, Setting{3, false}, Setting{4, false}}) {
    run_processes(setting, [](Group& group) {
      unsigned seed = 0;
      for (const int64_t count : sizes(group, 2))
        check_all_reduce(group, Type::bf16, Op::premul_sum, count, ++seed);
    });
  }
}

// ---- symmetric memory

// Symmetric memory on every rank; nothing outside the tensor may change.
class Symmetric {
 public:
  Symmetric(Group& group, int64_t bytes, int64_t id)
      : group_(group),
        shared_(std::make_shared<shm::Shared>(group, std::make_shared<shm::Block>(bytes), id,
                                              in_seconds(kLong))) {
    windows_.add(shared_);
  }

  // Writes the rank's input at `offset` and runs all_reduce with its window, as the backend does.
  void check(Type type, Op op, int64_t count, int64_t offset, unsigned seed) {
    std::vector<Bytes> inputs;
    for (int peer = 0; peer < group_.size(); ++peer) inputs.push_back(part(type, count, seed, peer));
    const auto bytes = static_cast<int64_t>(inputs[0].size());
    auto* memory = shared_->own().mapping.data();
    std::memset(memory, kAround, shared_->own().mapping.bytes());
    shm::copy(memory + offset, inputs[group_.rank()].data(), bytes);

    std::shared_ptr<shm::Shared> keep;
    std::vector<void*> peers;
    const auto window = windows_.find(memory + offset, bytes, keep, peers);
    EXPECT_EQ(window.id, bytes > 0 ? shared_->id() : 0);
    const auto sum = summing(group_, type, op, type);
    shm::all_reduce(group_, memory + offset, count, sum, window.id ? &window : nullptr, in_seconds(kLong));
    const std::string what = describe(group_, "symmetric all_reduce", count, seed);
    const Bytes expected = folded(inputs, count, sum.reduction);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), memory + offset)) << what;
    const auto* const end = memory + shared_->own().mapping.bytes();
    EXPECT_TRUE(all_are(kAround, memory, memory + offset) && all_are(kAround, memory + offset + bytes, end))
        << what << ": wrote beyond the ends";
  }

 private:
  static constexpr uint8_t kAround = 0xcd;
  Group& group_;
  std::shared_ptr<shm::Shared> shared_;
  shm::Windows windows_;
};

constexpr int64_t kSymmetricBytes = int64_t{2} << 20;

TEST(AllReduce, SymmetricTensorsAreFoldedWhereTheyAre) {
  for (const auto setting : settings()) {
    run_threads(setting, [](Group& group) {
      Symmetric memory(group, kSymmetricBytes, 5);
      unsigned seed = 0;
      for (const int64_t count : sizes_around(65536)) {
        memory.check(Type::f32, Op::sum, count, 0, ++seed);
        memory.check(Type::bf16, Op::avg, count, 4096 - 2, ++seed);
      }
    });
  }
}

TEST(AllReduce, ProcessesFoldSymmetricTensorsToo) {
  run_processes({4, false}, [](Group& group) {
    Symmetric memory(group, kSymmetricBytes, 1);
    unsigned seed = 0;
    for (const int64_t count : sizes_around(40001))
      memory.check(Type::f64, Op::product, std::min<int64_t>(count, 100000), 8, ++seed);
  });
}

TEST(AllReduce, TensorsAtDifferentPlacesOfSymmetricMemoryAreFoldedAlike) {
  run_threads({3, false}, [](Group& group) {
    Symmetric memory(group, kSymmetricBytes, 1);
    unsigned seed = 0;
    for (const int64_t count : {int64_t{1}, int64_t{1000}, int64_t{200003}})
      memory.check(Type::f32, Op::sum, count, group.rank() == 1 ? 64 : 0, ++seed);
  });
}

TEST(AllReduce, TensorsInDifferentSymmetricMemoriesAreFoldedAlike) {
  run_threads({2, true}, [](Group& group) {
    Symmetric first(group, kSymmetricBytes, 1), second(group, kSymmetricBytes, 2);
    unsigned seed = 0;
    for (const int64_t count : {int64_t{1}, int64_t{1000}, int64_t{200003}}) {
      (group.rank() == 0 ? first : second).check(Type::f32, Op::sum, count, 0, ++seed);
      second.check(Type::f32, Op::sum, count, 0, ++seed);
    }
  });
}

TEST(AllReduce, OneRankMayBeSymmetricAndOthersNot) {
  for (const auto setting : settings()) {
    run_threads(setting, [](Group& group) {
      Symmetric memory(group, kSymmetricBytes, 9);
      unsigned seed = 0;
      for (int odd = 0; odd < group.size(); ++odd) {
        for (const bool one_is_symmetric : {true, false}) {
          for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{4096}, group.round_bytes() / 7 * 3}) {
            const bool symmetric = (group.rank() == odd) == one_is_symmetric;
            ++seed;
            if (symmetric) memory.check(Type::f32, Op::sum, count, 128, seed);
            if (!symmetric) check_all_reduce(group, Type::f32, Op::sum, count, seed);
          }
        }
      }
    });
  }
}

TEST(Windows, AreFoundByTheAddressOfAllTheirBytesAndForgottenOnceFreed) {
  run_threads({2, true}, [](Group& group) {
    shm::Windows windows;
    auto shared =
        std::make_shared<shm::Shared>(group, std::make_shared<shm::Block>(8192), 3, in_seconds(kLong));
    windows.add(shared);
    const auto* data = shared->own().mapping.data();
    const auto id_of = [&](const void* at, int64_t bytes) {
      std::shared_ptr<shm::Shared> keep;
      std::vector<void*> peers;
      const auto window = windows.find(at, bytes, keep, peers);
      if (window.id) {
        EXPECT_EQ(window.offset, static_cast<const uint8_t*>(at) - data);
        EXPECT_EQ(window.peers[group.rank()], at);
      }
      return window.id;
    };
    EXPECT_EQ(id_of(data, 8192), 3);
    EXPECT_EQ(id_of(data + 8191, 1), 3);
    EXPECT_EQ(id_of(data, 8193), 0);
    EXPECT_EQ(id_of(data + 8192, 1), 0);
    EXPECT_EQ(id_of(data - 1, 2), 0);
    EXPECT_EQ(id_of(data, 0), 0);
    shared.reset();
    EXPECT_EQ(id_of(data, 1), 0);
    EXPECT_EQ(id_of(data, 1), 0);
  });
}

TEST(Windows, BlocksOfDifferentSizesAreRefusedOnAllRanksAndTheGroupGoesOn) {
  run_threads({3, false}, [](Group& group) {
    const auto share = [&](int64_t bytes) {
      shm::Shared(group, std::make_shared<shm::Block>(bytes), 1, in_seconds(kLong));
    };
    const std::string text = message_of(ErrorKind::config, [&] { share(group.rank() == 2 ? 8192 : 4096); });
    expect_in("sharing of memory of 8192 bytes on rank 2", text);
    share(4096);
    check_all_reduce(group, Type::f32, Op::sum, 100, 1);
  });
}

}  // namespace
}  // namespace gossamer::test
