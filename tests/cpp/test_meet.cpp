// The meeting: which ranks share a host is proven, never assumed; a rank that does not come is named in time; and a process
// that is not what it claims is refused.
#include "shm/meet.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <fstream>
#include <set>

#include "shm/symmetric.h"
#include "shm_collectives.h"

namespace gossamer::test {
namespace {

using shm::Fd;
using shm::Mapping;

// Shows each rank only the sockets of ranks that it can reach: so one host looks like several.
class PartialStore : public ThreadStore {
 public:
  using Reach = std::function<bool(int from, int to)>;
  explicit PartialStore(Reach reach) : reach_(std::move(reach)) {}
  std::string get_as(int rank, const std::string& key, shm::Deadline deadline) {
    const std::string value = get(key, deadline);
    const bool is_socket = key.compare(0, 7, "socket/") == 0;
    return is_socket && !reach_(rank, std::stoi(key.substr(7))) ? "gossamer-of-another-host" : value;
  }

 private:
  Reach reach_;
};

class StoreOfRank : public shm::Store {
 public:
  StoreOfRank(PartialStore& all, int rank) : all_(all), rank_(rank) {}
  void set(const std::string& key, const std::string& value) override { all_.set(key, value); }
  std::string get(const std::string& key, shm::Deadline deadline) override {
    return all_.get_as(rank_, key, deadline);
  }
  void remove(const std::string& key) noexcept override { all_.remove(key); }

 private:
  PartialStore& all_;
  int rank_;
};

// All ranks meet as threads; returns what each of them throws.
std::vector<std::string> run_hosts(int n, const PartialStore::Reach& reach, const Body& body) {
  PartialStore store(reach);
  std::vector<std::string> errors(n);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < n; ++rank) {
    ranks.emplace_back([&, rank] {
      StoreOfRank own(store, rank);
      errors[rank] = run_rank(own, rank, n, body);
    });
  }
  for (auto& rank : ranks) rank.join();
  return errors;
}

// ---- who shares a host

TEST(Meet, EveryRankFindsTheSameHostsAndItsPlace) {
  for (int n = 1; n <= 4; ++n) {
    std::vector<int> all(n);
    for (int rank = 0; rank < n; ++rank) all[rank] = rank;
    std::atomic<int> seen{0};
    run_threads(n, [&](Group& group) {
      EXPECT_EQ(group.size(), n);
      EXPECT_EQ(group.host(), 0);
      EXPECT_EQ(group.hosts(), std::vector<std::vector<int>>{all});
      for (int peer = 0; peer < n; ++peer) EXPECT_EQ(group.global_rank(peer), peer);
      seen.fetch_or(1 << group.rank());
    });
    EXPECT_EQ(seen.load(), (1 << n) - 1);
  }
}

TEST(Meet, RanksThatCannotReachEachOtherAreOfDifferentHosts) {
  const auto reach = [](int from, int to) { return from % 2 == to % 2; };
  std::mutex mutex;
  std::map<int, std::vector<int>> groups;  // by host
  const auto errors = run_hosts(5, reach, [&](Group& group) {
    EXPECT_EQ(group.hosts(), (std::vector<std::vector<int>>{{0, 2, 4}, {1, 3}}));
    const int own = group.global_rank(group.rank());
    EXPECT_EQ(group.host(), own % 2);
    EXPECT_EQ(group.rank(), own / 2);
    EXPECT_EQ(group.size(), own % 2 == 0 ? 3 : 2);
    check_all_reduce(group, Type::f32, Op::sum, 50000, 1 + static_cast<unsigned>(group.host()));
    const std::lock_guard<std::mutex> lock(mutex);
    groups[group.host()].push_back(own);
  });
  EXPECT_EQ(errors, std::vector<std::string>(5));
  for (auto& [host, ranks] : groups) std::sort(ranks.begin(), ranks.end());
  EXPECT_EQ(groups, (std::map<int, std::vector<int>>{{0, {0, 2, 4}}, {1, {1, 3}}}));
}

TEST(Meet, ErrorsNameRanksOfTheWholeGroup) {
  const auto reach = [](int from, int to) { return from % 2 == to % 2; };
  const auto errors = run_hosts(4, reach, [](Group& group) {
    if (group.host() == 0) return;
    const std::string text =
        message_of(ErrorKind::config, [&] { shm::agree_on_count(group, group.rank(), in_seconds(kLong)); });
    expect_in("0 in all on rank 1 and several operations, 1 in all on rank 3", text);
  });
  EXPECT_EQ(errors, std::vector<std::string>(4));
}

TEST(Meet, ARankThatReachesNobodyIsAHostOfItsOwn) {
  const auto errors = run_hosts(
      3, [](int, int) { return false; },
      [](Group& group) {
        EXPECT_EQ(group.hosts(), (std::vector<std::vector<int>>{{0}, {1}, {2}}));
        EXPECT_EQ(group.size(), 1);
        check_all_reduce(group, Type::f32, Op::sum, 5, 1);
      });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST(Meet, HostsWhoseRanksDoNotAllReachEachOtherAreRefusedOnAllRanks) {
  const auto reach = [](int from, int to) { return from - to == 1; };  // 2 reaches 1, 1 reaches 0
  const auto errors = run_hosts(3, reach, [](Group&) { ADD_FAILURE(); });
  for (const auto& error : errors)
    expect_in("rank 2 reaches rank 1, which reaches rank 0, but not that", error);
}

// ---- two groups

TEST(Meet, TwoGroupsOfTheSameRanksWorkAtOnce) {
  ThreadStore store;
  run_threads(3, [&](Group& first) {
    Group second(shm::meet(store, first.rank(), first.size(), in_seconds(kLong)));
    std::thread other([&] {
      for (unsigned i = 0; i < 30; ++i) check_all_reduce(second, Type::f32, Op::sum, 1000 * i, 2 * i);
    });
    for (unsigned i = 0; i < 30; ++i)
      check_all_reduce(first, Type::f32, Op::sum, 30000 - 1000 * i, 2 * i + 1);
    other.join();
  });
}

TEST(Meet, GroupsCanBeMadeAtOnceAndOfSomeOfTheRanks) {
  std::vector<ThreadStore> stores(4);
  run_threads(3, [&](Group& all) {
    std::vector<std::thread> threads;
    for (int left_out = 0; left_out < 4; ++left_out) {
      if (left_out == all.rank()) continue;
      threads.emplace_back([&, left_out] {
        const int rank = all.rank() - (all.rank() > left_out ? 1 : 0), size = left_out < 3 ? 2 : 3;
        Group group(shm::meet(stores[left_out], rank, size, in_seconds(kLong)));
        EXPECT_EQ(group.rank(), rank);
        check_all_reduce(group, Type::f32, Op::sum, 40000, static_cast<unsigned>(left_out));
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

size_t open_descriptors_and_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:gossamer") != std::string::npos;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

TEST(Meet, GroupsLeaveNoDescriptorsAndNoMappingsBehind) {
  const auto make = [] {
    run_threads(3, [](Group& group) {
      shm::Shared shared(group, std::make_shared<shm::Block>(4096), 1, in_seconds(kLong));
      shm::barrier(group, in_seconds(kLong));
    });
  };
  make();  // the watch of the process stays
  const size_t before = open_descriptors_and_mappings();
  for (int i = 0; i < 3; ++i) make();
  EXPECT_EQ(open_descriptors_and_mappings(), before);
}

// ---- ranks that do not come

// The message of a meeting that must fail.
std::string meeting_error(shm::Store& store, int rank, int size, double seconds = 0.3) {
  const auto start = shm::Clock::now();
  const std::string text =
      message_of(ErrorKind::comm, [&] { shm::meet(store, rank, size, in_seconds(seconds)); });
  EXPECT_LT(shm::Clock::now() - start, std::chrono::milliseconds(2000));
  return text;
}

TEST(Meet, ARankThatIsMissingIsATimeout) {
  for (const int missing : {0, 2}) {
    ThreadStore store;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == missing) continue;
      ranks.emplace_back(
          [&, rank] { expect_in("/" + std::to_string(missing), meeting_error(store, rank, 3)); });
    }
    for (auto& rank : ranks) rank.join();
  }
}

TEST(Meet, ARankThatWasSeenAndDoesNotAnswerIsNamed) {
  ThreadStore store;
  store.set("leader/1", "0");
  std::thread other([&] { expect_in("rank 1 does not answer", meeting_error(store, 2, 3, 10)); });
  expect_in("rank 1 does not answer", meeting_error(store, 0, 3));
  other.join();
}

// Takes the place of rank 0; rank 1 knows its socket.
struct FalseLeader {
  ThreadStore store;
  shm::Listener listener;
  std::thread thread;
  explicit FalseLeader(std::function<void(shm::Socket&)> act) {
    store.set("socket/0", listener.name());
    store.set("leader/0", "0");
    thread = std::thread([this, act] {
      auto socket = listener.accept(in_seconds(kLong));
      Bytes hello(2000);
      recv(socket.fd(), hello.data(), hello.size(), 0);
      act(socket);
    });
  }
  ~FalseLeader() { thread.join(); }
};

TEST(Meet, ALeaderThatDoesNotAnswerOrEndsIsNamed) {
  {
    FalseLeader silent([](shm::Socket& socket) {
      char byte;
      recv(socket.fd(), &byte, 1, 0);  // until rank 1 hangs up
    });
    expect_in("rank 0 does not answer", meeting_error(silent.store, 1, 2));
  }
  FalseLeader ended([](shm::Socket&) {});
  expect_in("rank 0 has ended", meeting_error(ended.store, 1, 2, kLong));
}

TEST(Meet, MemoryThatIsTooSmallOrCouldShrinkOrIsAnotherIsRefused) {
  struct Welcome {
    int32_t local = 1, size = 2;
    uint64_t proof = 42;
  };
  const auto send = [](int fd) {
    return [fd](shm::Socket& socket) {
      const Welcome welcome;
      socket.send(&welcome, sizeof(welcome), {fd}, in_seconds(kLong), "rank 1");
    };
  };
  const auto bytes = static_cast<size_t>(shm::Layout(2).bytes);
  const auto small = Mapping::create(4096), other = Mapping::create(bytes);
  const Fd unsealed(memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(unsealed.get(), static_cast<off_t>(bytes)), 0);
  const std::pair<int, std::string> cases[] = {
      {small.fd(), "must have " + std::to_string(bytes) + " bytes, got 4096"},
      {unsealed.get(), "must be sealed against shrinking"},
      {other.fd(), "the two do not share it"}};
  for (const auto& [fd, expected] : cases) {
    FalseLeader leader(send(fd));
    expect_in(expected, meeting_error(leader.store, 1, 2, kLong));
  }
}

// ---- strangers

TEST(Meet, AForeignNameIsNotARankOfThisHost) {
  for (const std::string name : {"", "nobody", "gossamer-0123456789abcdef"}) {
    EXPECT_FALSE(shm::connect(name).has_value()) << name;
  }
}

TEST(Meet, StrangersThatFindTheSocketAreTurnedAway) {
  ThreadStore store;
  std::thread stranger([&] {
    const auto socket = shm::connect(store.get("socket/0", in_seconds(kLong)));
    ASSERT_TRUE(socket.has_value());
    Bytes hello(4 + 1024);  // of a rank that does not exist
    hello[0] = 99;
    socket->send(hello.data(), hello.size(), {}, in_seconds(kLong), "rank 0");
    store.set("stranger", "has come");
    char byte;
    EXPECT_LE(recv(socket->fd(), &byte, 1, 0), 0);
  });
  std::vector<std::string> errors(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      if (rank == 1) store.get("stranger", in_seconds(kLong));
      errors[rank] = run_rank(store, rank, 2, [](Group& group) { shm::barrier(group, in_seconds(kLong)); });
    });
  }
  for (auto& rank : ranks) rank.join();
  stranger.join();
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

// Checks that each key is set once, and that only existing keys are removed.
class Recorder : public ThreadStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    change([&] { EXPECT_TRUE(all_.emplace(key, value).second) << key << " is set twice"; });
    ThreadStore::set(key, value);
  }
  void remove(const std::string& key) noexcept override {
    change([&] { EXPECT_EQ(all_.erase(key), 1u) << key << " is not there"; });
    ThreadStore::remove(key);
  }
  std::map<std::string, std::string> all() {
    std::map<std::string, std::string> copy;
    change([&] { copy = all_; });
    return copy;
  }

 private:
  void change(const std::function<void()>& how) {
    const std::lock_guard<std::mutex> lock(mutex_);
    how();
  }
  std::mutex mutex_;
  std::map<std::string, std::string> all_;
};

TEST(Meet, TheStoreHoldsANewSocketNameAndTheLeaderOfEachRankUntilForgotten) {
  Recorder store;
  std::set<std::string> names;
  for (int i = 0; i < 2; ++i) {
    run_threads(2, [&](Group& first) {
      const auto meeting = shm::meet(store, first.rank(), 2, in_seconds(kLong));
      const auto all = store.all();
      EXPECT_EQ(all.size(), 4u);
      EXPECT_EQ(meeting.name, all.at("socket/0"));
      shm::barrier(first, in_seconds(kLong));
      if (first.rank() == 0) {
        for (const char* rank : {"0", "1"}) {
          names.insert(all.at(std::string("socket/") + rank));
          EXPECT_EQ(all.at(std::string("leader/") + rank), "0");
        }
      }
      shm::forget(store, first.rank());
    });
    EXPECT_TRUE(store.all().empty());
  }
  EXPECT_EQ(names.size(), 4u);
}

// The system call itself, unlike libc's function, changes the user of this thread alone.
TEST(Meet, RanksOfAnotherUserAreRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be another user";
  ThreadStore store;
  const shm::Listener listener;
  store.set("socket/0", listener.name());
  std::thread other([&] {
    ASSERT_EQ(syscall(SYS_setresuid, -1, 65534, -1), 0);
    expect_in("ranks of a host must run as one user", meeting_error(store, 1, 2));
  });
  other.join();
}

}  // namespace
}  // namespace gossamer::test
