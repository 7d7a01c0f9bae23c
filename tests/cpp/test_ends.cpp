// What happens to waiting ranks when a rank is silent, leaves, is killed, or gives up: they get an Error(comm) that names
// it, in time, and the group cannot be used any more.
#include <gtest/gtest.h>

#include "shm_collectives.h"

namespace gossamer::test {
namespace {

constexpr auto kSoon = std::chrono::milliseconds(1000);

void wait_for(const std::function<bool()>& happened) {
  const auto until = in_seconds(20);
  while (!happened() && shm::Clock::now() < until) usleep(1000);
  EXPECT_TRUE(happened());
}

std::string comm_error_of(Group& group, double seconds = kLong) {
  return message_of(ErrorKind::comm, [&] { shm::barrier(group, in_seconds(seconds)); });
}

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

// ---- silence

// One of the waiting ranks is the first to run out of time; the others say the same, or repeat what it said.
void expect_silent(const std::string& ranks, const std::string& time, const std::string& text) {
  const bool own = text.find("Timed out after " + time + "; silent: " + ranks) != std::string::npos;
  const bool told = text.find(ranks + " did not come within " + time) != std::string::npos;
  EXPECT_TRUE(own || told) << text;
}

TEST(Ends, TimeoutsNameTheSilentRankAndBreakTheGroup) {
  for (const auto setting : {Setting{2, true}, Setting{2, false}, Setting{4, false}}) {
    for (const int silent : {0, 1}) {
      std::atomic<int> thrown{0};
      run_threads(setting, [&](Group& group) {
        if (group.rank() == silent) {
          wait_for([&] { return thrown.load() == group.size() - 1; });
          // This rank's coming may end the others' round, but not the next one.
          expect_in(rank_name(silent) + " did not come within 0.25 s", message_of(ErrorKind::comm, [&] {
                      for (int i = 0; i < 2; ++i) shm::barrier(group, in_seconds(kLong));
                    }));
          return;
        }
        const auto start = shm::Clock::now();
        const std::string text = comm_error_of(group, 0.25);
        expect_in("barrier on " + rank_name(group.rank()) + ": ", text);
        expect_silent(rank_name(silent), "0.25 s", text);
        EXPECT_LT(shm::Clock::now() - start, std::chrono::milliseconds(250) + kSoon);
        if (text.find("Timed out") != std::string::npos) {
          EXPECT_GE(shm::Clock::now() - start, std::chrono::milliseconds(250));
        }
        thrown.fetch_add(1);
        const std::string again = comm_error_of(group);
        expect_in("cannot be used any more", again);
        expect_silent(rank_name(silent), "0.25 s", again);
      });
    }
  }
}

TEST(Ends, TimeoutsNameAllSilentRanks) {
  std::atomic<int> thrown{0};
  run_threads({4, false}, [&](Group& group) {
    if (group.rank() % 2 == 1) return wait_for([&] { return thrown.load() == 2; });
    expect_silent("rank 1, 3", "0.2 s", comm_error_of(group, 0.2));
    thrown.fetch_add(1);
  });
}

TEST(Ends, ADeadlineThatHasPassedIsATimeoutAtOnce) {
  std::atomic<bool> thrown{false};
  run_threads({2, false}, [&](Group& group) {
    if (group.rank() == 1) return wait_for([&] { return thrown.load(); });
    const auto start = shm::Clock::now();
    expect_in("Timed out", comm_error_of(group, -1));
    EXPECT_LT(shm::Clock::now() - start, kSoon);
    thrown.store(true);
  });
}

TEST(Ends, OneRankNeverTimesOut) {
  run_threads({1, false}, [](Group& group) {
    for (int i = 0; i < 3; ++i) shm::barrier(group, in_seconds(-1));
  });
}

// ---- abort

// Rank 0 is aborted while it waits; the last rank comes once `hearers` have thrown.
void abort_first(Setting setting, int hearers) {
  std::atomic<int> thrown{0};
  run_threads(setting, [&](Group& group) {
    if (group.rank() == group.size() - 1) {
      wait_for([&] { return thrown.load() == hearers; });
      expect_in("rank 0 has failed: the watchdog barked", message_of(ErrorKind::comm, [&] {
                  for (int i = 0; i < 2; ++i) shm::barrier(group, in_seconds(kLong));
                }));
      return;
    }
    std::thread watchdog([&] {
      if (group.rank() != 0) return;
      usleep(100000);
      group.abort("the watchdog barked");
      group.abort("it barked again");
    });
    const auto start = shm::Clock::now();
    const std::string text = comm_error_of(group);
    EXPECT_LT(shm::Clock::now() - start, kSoon);
    watchdog.join();
    expect_in(group.rank() == 0 ? ": the watchdog barked" : "rank 0 has failed: the watchdog barked", text);
    expect_in("the watchdog barked", comm_error_of(group));
    EXPECT_EQ(group.aborted(), group.rank() == 0);
    thrown.fetch_add(1);
  });
}

TEST(Ends, AbortWakesTheRankThatWaitsAndTheOthersLearnWhy) {
  for (const bool spins : {true, false}) abort_first({2, spins}, 1);
}

TEST(Ends, AbortAlsoWakesThoseWhoWaitForAThirdRank) { abort_first({3, false}, 2); }

TEST(Ends, AnAbortedRankWaitsForNobodyAnyMore) {
  std::atomic<bool> thrown{false};
  run_threads({2, false}, [&](Group& group) {
    if (group.rank() == 1) return wait_for([&] { return thrown.load(); });
    group.abort("enough");
    const auto start = shm::Clock::now();
    expect_in("enough", comm_error_of(group));
    EXPECT_LT(shm::Clock::now() - start, kSoon);
    thrown.store(true);
  });
}

// ---- leaving

TEST(Ends, ARankThatHasLeftIsNamed) {
  for (const int leaver : {0, 2}) {
    const Body body = [&](Group& group) {
      shm::barrier(group, in_seconds(kLong));
      if (group.rank() == leaver) return;
      const auto start = shm::Clock::now();
      expect_in(rank_name(leaver) + " has left the group", comm_error_of(group));
      EXPECT_LT(shm::Clock::now() - start, kSoon);
    };
    run_threads({3, false}, body);
    run_threads({3, true}, body);
    run_processes({3, false}, body);
  }
}

TEST(Ends, ARankThatGaveUpAloneDoesNotHangTheOthers) {
  run_threads({3, true}, [](Group& group) {
    if (group.rank() == 1) {
      expect_in("Timed out", comm_error_of(group, 0.1));
      return;
    }
    usleep(300000);
    const auto start = shm::Clock::now();
    const std::string text = message_of(ErrorKind::comm, [&] {
      for (int i = 0; i < 2; ++i) shm::barrier(group, in_seconds(kLong));
    });
    EXPECT_LT(shm::Clock::now() - start, kSoon);
    expect_in("rank ", text);
  });
}

// ---- killed processes

// Tells the other processes when something was done.
class SharedTime {
 public:
  SharedTime() : memory_(shm::Mapping::create(64)) {}
  void now() { word().store(shm::Clock::now().time_since_epoch().count()); }
  shm::Clock::duration since() {
    EXPECT_NE(word().load(), 0);
    return shm::Clock::now().time_since_epoch() - shm::Clock::duration(word().load());
  }

 private:
  std::atomic<int64_t>& word() { return *reinterpret_cast<std::atomic<int64_t>*>(memory_.data()); }
  shm::Mapping memory_;
};

void die(SharedTime& death) {
  death.now();
  kill(getpid(), SIGKILL);
}

TEST(Ends, AKilledRankIsNoticedWithinASecondAndNamed) {
  for (const int victim : {0, 1, 2}) {
    SharedTime death;
    const Body body = [&](Group& group) {
      shm::barrier(group, in_seconds(kLong));
      if (group.rank() == victim) {
        usleep(100000);
        die(death);
      }
      const std::string text = comm_error_of(group);
      EXPECT_LT(death.since(), kSoon);
      expect_in(rank_name(victim) + " has ended without a word", text);
    };
    run_processes(3, body, {victim});
  }
}

TEST(Ends, ARankKilledInTheMiddleOfItsOperationsIsNoticed) {
  for (const int victim : {0, 3}) {
    SharedTime death;
    const Body body = [&](Group& group) {
      std::thread killer;
      if (group.rank() == victim) {
        killer = std::thread([&] {
          usleep(150000);
          die(death);
        });
      }
      const std::string text = message_of(ErrorKind::comm, [&] {
        for (unsigned i = 0;; ++i) check_all_reduce(group, Type::f32, Op::sum, 200000, i);
      });
      EXPECT_LT(death.since(), kSoon);
      expect_in(rank_name(victim) + " has ended without a word", text);
    };
    run_processes(4, body, {victim});
  }
}

// The first rank of a host watches the others, so once it is gone they must watch each other.
void outlive_two(Group& group, bool first_is_killed, SharedTime& death) {
  shm::barrier(group, in_seconds(kLong));
  const auto gone = [&](int rank) { return [&group, rank] { return !group.trouble(rank).empty(); }; };
  if (group.rank() == 0) {
    usleep(50000);
    if (first_is_killed) kill(getpid(), SIGKILL);
    return;
  }
  wait_for(gone(0));
  expect_in(first_is_killed ? "rank 0 has ended without a word" : "rank 0 has left", group.trouble(0));
  if (group.rank() == 2) {
    usleep(200000);
    die(death);
  }
  EXPECT_EQ(group.trouble(2), "");
  EXPECT_EQ(group.trouble(4 - group.rank()), "");
  wait_for(gone(2));
  EXPECT_LT(death.since(), kSoon);
  expect_in("rank 2 has ended without a word", group.trouble(2));
  EXPECT_EQ(group.trouble(4 - group.rank()), "");
  usleep(100000);  // the others look, too, before this rank leaves
}

TEST(Ends, AKilledRankIsNoticedAlsoOnceRankZeroHasLeft) {
  SharedTime death;
  run_processes(4, [&](Group& group) { outlive_two(group, false, death); }, {2});
}

TEST(Ends, AKilledRankIsNoticedAlsoOnceRankZeroWasKilled) {
  SharedTime death;
  run_processes(4, [&](Group& group) { outlive_two(group, true, death); }, {0, 2});
}

TEST(Ends, WhoeverWaitsInARoundThatRankZeroWasKilledInNoticesTheNextKill) {
  SharedTime death;
  const Body body = [&](Group& group) {
    shm::barrier(group, in_seconds(kLong));
    std::thread killer;
    if (group.rank() == 0) {
      killer = std::thread([&] {
        usleep(100000);
        die(death);
      });
    }
    if (group.rank() == 2) {  // the others wait for it
      wait_for([&] { return !group.trouble(0).empty(); });
      usleep(100000);
      die(death);
    }
    expect_in("has ended without a word", comm_error_of(group));
    EXPECT_LT(death.since(), kSoon);
  };
  run_processes(4, body, {0, 2});
}

TEST(Ends, ARankKilledAfterItCameIsNoticedWhileAThirdIsAwaited) {
  SharedTime death;
  const Body body = [&](Group& group) {
    shm::barrier(group, in_seconds(kLong));
    std::thread killer;
    if (group.rank() == 1) {
      killer = std::thread([&] {
        usleep(100000);
        die(death);
      });
    }
    if (group.rank() == 2) usleep(2500000);
    // Rank 2 may still end the round that the others gave up, but not the next one.
    expect_in("rank 1 has ended without a word", message_of(ErrorKind::comm, [&] {
                for (int i = 0; i < 2; ++i) shm::barrier(group, in_seconds(kLong));
              }));
    EXPECT_TRUE(group.rank() != 0 || death.since() < kSoon);
  };
  run_processes(3, body, {1});
}

}  // namespace
}  // namespace gossamer::test
