// Groups for the tests of shm/: n ranks on this host as threads, or as forked processes where a test ends one. A body gets
// its Group; if something is wrong it throws or fails an expectation.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "shm/group.h"
#include "shm/mailbox.h"

#if defined(__SANITIZE_THREAD__)
// run_processes() forks a process that may have threads; the children use none of them.
extern "C" __attribute__((weak, used)) const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace gossamer::test {

using Body = std::function<void(shm::Group&)>;
constexpr unsigned kTestSeconds = 50;  // a forked rank that hangs is killed after this time

inline shm::Deadline in_seconds(double seconds) {
  return shm::Clock::now() +
         std::chrono::duration_cast<shm::Clock::duration>(std::chrono::duration<double>(seconds));
}

class ThreadStore : public shm::Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    news_.notify_all();
  }
  std::string get(const std::string& key, shm::Deadline deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool found = news_.wait_until(lock, deadline, [&] { return values_.count(key) > 0; });
    GOSSAMER_CHECK(found, ErrorKind::comm, "the test's store: nobody has set ", key);
    return values_[key];
  }
  void remove(const std::string& key) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_.erase(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable news_;
  std::map<std::string, std::string> values_;
};

// A store in a mapping that forked processes share: entries are written once and never change.
class ProcessStore : public shm::Store {
 public:
  ProcessStore()
      : shared_(static_cast<Shared*>(
            mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    GOSSAMER_CHECK(shared_ != MAP_FAILED, ErrorKind::comm, "the test's store: mmap failed");
  }
  ~ProcessStore() override { munmap(shared_, sizeof(Shared)); }
  ProcessStore(const ProcessStore&) = delete;
  ProcessStore& operator=(const ProcessStore&) = delete;

  void set(const std::string& key, const std::string& value) override {
    const uint32_t place = shared_->used.fetch_add(1);
    GOSSAMER_CHECK(place < kEntries && key.size() < kText && value.size() < kText, ErrorKind::comm,
                   "the test's store: no room for ", key);
    Entry& entry = shared_->entries[place];
    std::strcpy(entry.key, key.c_str());
    std::strcpy(entry.value, value.c_str());
    entry.ready.store(true);
  }
  std::string get(const std::string& key, shm::Deadline deadline) override {
    do {
      for (const Entry& entry : shared_->entries) {
        if (entry.ready.load() && key == entry.key) return entry.value;
      }
      usleep(1000);
    } while (shm::Clock::now() < deadline);
    raise(ErrorKind::comm, "the test's store: nobody has set ", key);
  }
  void remove(const std::string& key) noexcept override {
    for (Entry& entry : shared_->entries) {
      if (key == entry.key) entry.ready.store(false);
    }
  }

 private:
  static constexpr uint32_t kEntries = 1024;
  static constexpr size_t kText = 128;
  struct Entry {
    std::atomic<bool> ready;
    char key[kText], value[kText];
  };
  struct Shared {
    std::atomic<uint32_t> used;
    Entry entries[kEntries];
  };
  Shared* shared_;
};

// What went wrong when this rank ran `body`; empty if nothing did.
inline std::string run_rank(shm::Store& store, int rank, int n, const Body& body) {
  try {
    shm::Group group(shm::meet(store, rank, n, in_seconds(20)));
    body(group);
  } catch (const std::exception& error) {
    return "rank " + std::to_string(rank) + ": " + error.what();
  }
  return {};
}

inline void run_threads(int n, const Body& body) {
  ThreadStore store;
  std::vector<std::string> errors(n);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < n; ++rank) {
    ranks.emplace_back([&, rank] { errors[rank] = run_rank(store, rank, n, body); });
  }
  for (auto& rank : ranks) rank.join();
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

// `victims` are the ranks that must be ended by a SIGKILL.
inline void run_processes(int n, const Body& body, const std::vector<int>& victims = {}) {
  ProcessStore store;
  std::vector<pid_t> children(n);
  std::fflush(nullptr);
  for (int rank = 0; rank < n; ++rank) {
    children[rank] = fork();
    ASSERT_GE(children[rank], 0) << std::strerror(errno);
    if (children[rank] > 0) continue;
    alarm(kTestSeconds);
    const std::string error = run_rank(store, rank, n, body);
    if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
    std::fflush(nullptr);
    _exit(!error.empty() || testing::Test::HasFailure() ? 1 : 0);
  }
  for (int rank = 0; rank < n; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(children[rank], &status, 0), children[rank]);
    const bool victim = std::find(victims.begin(), victims.end(), rank) != victims.end();
    const bool as_planned = victim ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                   : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    EXPECT_TRUE(as_planned) << "rank " << rank << " ended with status " << status << ", see its output above";
  }
}

// The message of a call that must throw an Error of this kind.
template <class Call>
std::string message_of(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind, kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// ---- messages

using Bytes = std::vector<uint8_t>;

constexpr double kLong = 30;  // s, for operations that must not time out

// For every eight bytes: which bits stay random, and which are set.
struct Pattern {
  uint64_t random = ~uint64_t{0}, set = 0;
};

// The same bytes for the same seed. These functions go over memory in words or by memcmp, because a sanitizer takes long
// to look at each byte.
inline Bytes content(int64_t bytes, uint64_t seed, Pattern bits = {}) {
  Bytes data((bytes + 7) / 8 * 8);
  uint8_t* to = data.data();
  uint8_t* const end = to + data.size();
  uint64_t state = seed * 0xd1342543de82ef95;
  for (; to < end; to += 8) {  // splitmix64
    uint64_t word = state += 0x9e3779b97f4a7c15;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    word = ((word ^ (word >> 31)) & bits.random) | bits.set;
    std::memcpy(to, &word, 8);
  }
  data.resize(bytes);
  return data;
}

inline bool all_are(uint8_t value, const uint8_t* begin, const uint8_t* end) {
  return begin == end || (*begin == value && std::memcmp(begin, begin + 1, end - begin - 1) == 0);
}

// What Done got. The error is carried as its text, because libstdc++ counts the owners of an exception out of
// ThreadSanitizer's sight.
struct Outcome {
  int source;
  ErrorKind kind;
  std::string error;
};

struct Flight {
  Bytes data;
  std::future<Outcome> result;
  int get() {
    const Outcome outcome = result.get();
    if (!outcome.error.empty()) throw Error(outcome.kind, outcome.error);
    return outcome.source;
  }
};

inline shm::Mailbox::Done done_into(std::future<Outcome>& result) {
  auto promise = std::make_shared<std::promise<Outcome>>();
  result = promise->get_future();
  return [promise](int source, std::exception_ptr error) {
    Outcome outcome{source, ErrorKind::codec, {}};
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Error& caught) {
      outcome.kind = caught.kind;
      outcome.error = caught.what();
    }
    promise->set_value(std::move(outcome));
  };
}

inline Flight send(shm::Mailbox& mail, int to, uint64_t tag, Bytes data, double seconds = kLong) {
  Flight flight{std::move(data), {}};
  const auto done = done_into(flight.result);
  mail.send(to, tag, flight.data.data(), static_cast<int64_t>(flight.data.size()), in_seconds(seconds), done);
  return flight;
}

inline Flight receive(shm::Mailbox& mail, int from, uint64_t tag, int64_t bytes, double seconds = kLong) {
  Flight flight{Bytes(bytes), {}};
  const auto done = done_into(flight.result);
  mail.receive(from, tag, flight.data.data(), bytes, in_seconds(seconds), done);
  return flight;
}

inline std::string error_of(ErrorKind kind, Flight& flight) {
  return message_of(kind, [&] { flight.get(); });
}

inline void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

// Returns once both ranks have come to this point; sends messages of its own.
inline void sync(shm::Mailbox& mail, int peer) {
  constexpr uint64_t kTag = 1u << 30;
  auto out = send(mail, peer, kTag, {});
  receive(mail, peer, kTag, 0).get();
  out.get();
}

}  // namespace gossamer::test
