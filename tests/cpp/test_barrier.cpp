// Barriers, and what they share with all operations: ranks that call different things, or refuse theirs, all get the
// same Error(config), and the group goes on.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

constexpr int kBarriers = kSanitized ? 200 : 1000;

TEST(Barrier, NobodyPassesBeforeAllHaveCome) {
  for (const auto setting : settings()) {
    std::vector<std::atomic<int>> came(kBarriers);
    run_threads(setting, [&](Group& group) {
      std::minstd_rand random(static_cast<unsigned>(group.rank()) + 1);
      for (int i = 0; i < kBarriers; ++i) {
        if (random() % 50 == 0) usleep(200);
        came[i].fetch_add(1);
        shm::barrier(group, in_seconds(kLong));
        EXPECT_EQ(came[i].load(), group.size());
      }
    });
  }
}

TEST(Barrier, ProcessesMeetToo) {
  for (const auto setting : {Setting{2, true}, Setting{4, false}}) {
    run_processes(setting, [](Group& group) {
      for (int i = 0; i < kBarriers; ++i) shm::barrier(group, in_seconds(kLong));
      check_all_reduce(group, Type::i32, Op::sum, 3, 1);
    });
  }
}

TEST(Barrier, ManyRanksMeet) {
  std::atomic<int> came{0};
  run_threads({33, false}, [&](Group& group) {
    for (int i = 1; i <= 20; ++i) {
      came.fetch_add(1);
      shm::barrier(group, in_seconds(kLong));
      EXPECT_EQ(came.load(), i * group.size());
      shm::barrier(group, in_seconds(kLong));
    }
  });
}

TEST(Barrier, RanksAgreeOnACountOrAllLearnOfTheDifference) {
  for (const auto setting : {Setting{1, true}, Setting{2, true}, Setting{3, false}}) {
    run_threads(setting, [](Group& group) {
      shm::agree_on_count(group, 7, in_seconds(kLong));
      if (group.size() == 1) return;
      const std::string text = message_of(ErrorKind::config, [&] {
        shm::agree_on_count(group, group.rank() == 1 ? 8 : 7, in_seconds(kLong));
      });
      expect_in("several operations, 7 in all on rank 0 and several operations, 8 in all on rank 1", text);
      shm::agree_on_count(group, 0, in_seconds(kLong));
    });
  }
}

// ---- different calls

struct Memory {
  Bytes in = Bytes(256), out = Bytes(256);
  std::vector<const void*> ins;
  std::vector<void*> outs;
  std::vector<int64_t> eight;
  explicit Memory(int size) : ins(size, in.data()), outs(size, out.data()), eight(size, 8) {}
};
using Call = std::function<void(Group&, Memory&)>;

Call all_reduce_call(Type type, Op op, int64_t count) {
  return [=](Group& group, Memory& memory) {
    const auto sum = summing(group, type, op, type);
    shm::all_reduce(group, memory.out.data(), count, sum, nullptr, in_seconds(kLong));
  };
}

Call reduce_call(int root) {
  return [=](Group& group, Memory& memory) {
    const auto sum = summing(group, Type::f32, Op::sum, Type::f32);
    shm::reduce(group, memory.in.data(), memory.out.data(), 8, sum, root, in_seconds(kLong));
  };
}

Call broadcast_call(int64_t bytes, int root) {
  return [=](Group& group, Memory& memory) {
    shm::broadcast(group, memory.out.data(), bytes, root, in_seconds(kLong));
  };
}

std::vector<Call> different_calls() {
  return {
      [](Group& group, Memory&) { shm::barrier(group, in_seconds(kLong)); },
      [](Group& group, Memory&) { shm::agree_on_count(group, 8, in_seconds(kLong)); },
      all_reduce_call(Type::f32, Op::sum, 8),
      all_reduce_call(Type::f32, Op::sum, 9),
      all_reduce_call(Type::f32, Op::avg, 8),
      all_reduce_call(Type::i32, Op::sum, 8),
      reduce_call(0),
      reduce_call(1),
      broadcast_call(8, 0),
      broadcast_call(9, 0),
      broadcast_call(8, 1),
      [](Group& group, Memory& memory) {
        shm::gather(group, memory.in.data(), memory.outs.data(), 8, 0, in_seconds(kLong));
      },
      [](Group& group, Memory& memory) {
        shm::scatter(group, memory.ins.data(), memory.out.data(), 8, 0, in_seconds(kLong));
      },
      [](Group& group, Memory& memory) {
        shm::all_gather(group, memory.in.data(), memory.outs.data(), memory.eight.data(), in_seconds(kLong));
      },
      [](Group& group, Memory& memory) {
        const auto sum = summing(group, Type::f32, Op::sum, Type::f32);
        shm::reduce_scatter(group, memory.ins.data(), memory.out.data(), memory.eight.data(), sum,
                            in_seconds(kLong));
      },
      [](Group& group, Memory& memory) {
        shm::all_to_all(group, memory.ins.data(), memory.eight.data(), memory.outs.data(),
                        memory.eight.data(), in_seconds(kLong));
      },
  };
}

TEST(Barrier, DifferentCallsAreRefusedOnAllRanksAlikeAndTheGroupGoesOn) {
  for (const auto setting : {Setting{2, true}, Setting{3, false}}) {
    const auto calls = different_calls();
    std::vector<std::vector<std::string>> texts(setting.ranks);
    run_threads(setting, [&](Group& group) {
      Memory memory(group.size());
      for (size_t most = 0; most < calls.size(); ++most) {
        for (size_t one = 0; one < calls.size(); ++one) {
          const bool differs = group.rank() == static_cast<int>(one) % group.size();
          const auto& call = calls[differs ? one : most];
          if (one == most) {
            call(group, memory);
            continue;
          }
          texts[group.rank()].push_back(message_of(ErrorKind::config, [&] { call(group, memory); }));
          expect_in("every rank must make the same call, got ", texts[group.rank()].back());
        }
      }
      check_all_reduce(group, Type::f32, Op::sum, 100000, 1);
    });
    for (const auto& rank : texts) EXPECT_EQ(rank, texts[0]);
  }
}

TEST(Barrier, MessagesNameTheCallsAndTheRanks) {
  run_threads({3, false}, [](Group& group) {
    Memory memory(group.size());
    const auto text = [&](const Call& most, const Call& last) {
      const auto& call = group.rank() == 2 ? last : most;
      return message_of(ErrorKind::config, [&] { call(group, memory); });
    };
    expect_in("got all_reduce of 8 float32 (SUM) on rank 0 and all_reduce of 9 float32 (SUM) on rank 2",
              text(all_reduce_call(Type::f32, Op::sum, 8), all_reduce_call(Type::f32, Op::sum, 9)));
    expect_in("got broadcast of 8 bytes, root 1 on rank 0 and reduce of 8 float32 (SUM), root 0 on rank 2",
              text(broadcast_call(8, 1), reduce_call(0)));
  });
}

// ---- refused calls

TEST(Barrier, ARefusedCallReachesAllRanksWithItsReasonAndTheGroupGoesOn) {
  for (const auto setting : {Setting{1, true}, Setting{2, true}, Setting{4, false}}) {
    run_threads(setting, [](Group& group) {
      for (int refuser = 0; refuser < group.size(); ++refuser) {
        const std::string reason = "tensors must be dense, got #" + std::to_string(refuser);
        if (group.rank() == refuser) {
          group.refuse(reason, in_seconds(kLong));
        } else {
          const std::string text = message_of(ErrorKind::config, [&] {
            Bytes data(1000000);
            shm::broadcast(group, data.data(), 1000000, refuser, in_seconds(kLong));
          });
          expect_in("broadcast of 1000000 bytes", text);
          expect_in("rank " + std::to_string(refuser) + " refused its call: " + reason, text);
        }
        check_all_reduce(group, Type::f32, Op::sum, 1000, 1);
      }
    });
  }
}

TEST(Barrier, AllRanksMayRefuseAndLongReasonsAreCut) {
  run_threads({3, false}, [](Group& group) {
    group.refuse("no", in_seconds(kLong));
    const std::string reason(2 * shm::kReasonBytes, 'x');
    if (group.rank() == 0) {
      group.refuse(reason, in_seconds(kLong));
    } else {
      const auto text = message_of(ErrorKind::config, [&] { shm::barrier(group, in_seconds(kLong)); });
      expect_in("refused its call: " + reason.substr(0, shm::kReasonBytes - 1), text);
    }
    shm::barrier(group, in_seconds(kLong));
  });
}

}  // namespace
}  // namespace gossamer::test
