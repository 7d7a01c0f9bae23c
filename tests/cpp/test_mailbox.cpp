// The mailbox: every message arrives once, whole, in its tag's order and at its own receive. A failure is reported on both
// sides, and the next message goes through.
#include "shm/mailbox.h"

#include <random>

#include "sampled.h"
#include "shm_support.h"

namespace gossamer::test {
namespace {

using shm::Group;
using shm::Mailbox;

constexpr int64_t kBig = (int64_t{3} << 20) + 7;

// Both sides use one mapping here, so that ThreadSanitizer sees the order that the counters give.
TEST(Mailbox, ARingHandsFramesOverWhole) {
  constexpr unsigned kFrames = 20000;
  std::vector<uint64_t> memory((shm::mail_bytes(2) + shm::kLine) / 8);
  const auto lines = (reinterpret_cast<uintptr_t>(memory.data()) + shm::kLine - 1) / shm::kLine;
  auto* mail = reinterpret_cast<uint8_t*>(lines * shm::kLine);
  const shm::Ring ring(mail, 2, 0, 1);
  std::thread writer([&] {
    for (unsigned i = 0; i < kFrames; ++i) {
      const Bytes payload(i % 5000, static_cast<uint8_t>(i));
      const shm::Frame frame{shm::FrameKind::part, i % 5000, i, 0, 0};
      while (!ring.write(frame, payload.data())) std::this_thread::yield();
    }
  });
  for (unsigned i = 0; i < kFrames; ++i) {
    while (ring.written() == ring.read()) std::this_thread::yield();
    const shm::Frame frame = ring.front();
    Bytes payload(frame.payload);
    ring.copy_payload(frame, payload.data());
    ring.pop(frame);
    EXPECT_TRUE(frame.id == i && payload == Bytes(i % 5000, static_cast<uint8_t>(i))) << i;
  }
  writer.join();
}

TEST(Mailbox, MessagesOfOneTagArriveInOrderWhateverTheirSize) {
  const std::vector<int64_t> sizes = {0, 1, 4095, 4096, 4097, 100, 262143, 262144, 300001, 5, kBig, 8};
  run_threads(2, [&](Group& group) {
    Mailbox mail(group);
    std::vector<Flight> flights;
    for (unsigned i = 0; i < sizes.size(); ++i) {
      flights.push_back(group.rank() == 0 ? send(mail, 1, 7, content(sizes[i], i))
                                          : receive(mail, 0, 7, sizes[i]));
    }
    for (unsigned i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(flights[i].get(), group.rank() == 0 ? 1 : 0);
      EXPECT_TRUE(flights[i].data == content(sizes[i], i)) << sizes[i];
    }
  });
}

TEST(Mailbox, UnreceivedMessagesDoNotBlockOtherTags) {
  constexpr int kCount = 200;  // of each size, far more than a ring holds or may be sent whole
  run_threads(2, [&](Group& group) {
    Mailbox mail(group);
    std::vector<Flight> flights;
    if (group.rank() == 0) {
      for (unsigned i = 0; i < kCount; ++i) {
        flights.push_back(send(mail, 1, i, content(4096, i)));
        flights.push_back(send(mail, 1, kCount + i, content(50000, i)));
      }
      for (auto& flight : flights) flight.get();
      return;
    }
    for (unsigned i = kCount; i-- > 0;) {  // the last first, each before the next is asked for
      auto big = receive(mail, 0, kCount + i, 50000);
      auto small = receive(mail, 0, i, 4096);
      big.get();
      small.get();
      EXPECT_TRUE(big.data == content(50000, i) && small.data == content(4096, i)) << i;
    }
  });
}

TEST(Mailbox, ReceiveFromAnySourceTakesEveryMessageOnceAndNobodyStarves) {
  constexpr int kRanks = 4, kEach = 100;
  run_threads(kRanks, [&](Group& group) {
    Mailbox mail(group);
    if (group.rank() > 0) {
      for (unsigned i = 0; i < kEach; ++i) {
        send(mail, 0, 3, content(1000, static_cast<unsigned>(group.rank()) * kEach + i)).get();
      }
      return;
    }
    std::vector<unsigned> from(kRanks);
    for (int i = 0; i < (kRanks - 1) * kEach; ++i) {
      auto flight = receive(mail, -1, 3, 1000);
      const int source = flight.get();
      EXPECT_TRUE(flight.data == content(1000, static_cast<unsigned>(source) * kEach + from[source]));
      ++from[source];
    }
    EXPECT_EQ(from, (std::vector<unsigned>{0, kEach, kEach, kEach}));
  });
}

TEST(Mailbox, FirstToArriveIsFirstForAnySource) {
  run_threads(2, [](Group& group) {
    Mailbox mail(group);
    auto first = send(mail, 1 - group.rank(), 5, Bytes(8));
    sync(mail, 1 - group.rank());  // the peer's message is here: this one came after it through the same ring
    auto second = send(mail, group.rank(), 5, Bytes(8));
    EXPECT_EQ(receive(mail, -1, 5, 8).get(), 1 - group.rank());
    EXPECT_EQ(receive(mail, -1, 5, 8).get(), group.rank());
    first.get();
    second.get();
  });
}

TEST(Mailbox, ARankCanSendToItself) {
  for (const int ranks : {1, 3}) {
    run_threads(ranks, [](Group& group) {
      Mailbox mail(group);
      for (const int64_t bytes : {int64_t{0}, int64_t{8}, kBig}) {
        auto out = send(mail, group.rank(), 1, content(bytes, 3));
        auto in = receive(mail, bytes == 8 ? -1 : group.rank(), 1, bytes);
        EXPECT_EQ(in.get(), group.rank());
        EXPECT_EQ(out.get(), group.rank());
        EXPECT_TRUE(in.data == out.data);
      }
    });
  }
}

TEST(Mailbox, BigMessagesPassEachOther) {
  run_threads(2, [](Group& group) {
    Mailbox mail(group);
    const unsigned rank = static_cast<unsigned>(group.rank());
    auto out = send(mail, 1 - group.rank(), 0, content(kBig, rank));
    auto more = send(mail, 1 - group.rank(), 1, content(kBig, rank + 2));
    auto in = receive(mail, 1 - group.rank(), 1, kBig);  // the second first
    EXPECT_EQ(in.get(), 1 - group.rank());
    EXPECT_TRUE(in.data == content(kBig, 3 - rank));
    in = receive(mail, 1 - group.rank(), 0, kBig);
    in.get();
    EXPECT_TRUE(in.data == content(kBig, 1 - rank));
    out.get();
    more.get();
  });
}

struct Planned {
  int from, to;
  uint64_t tag;
  int64_t bytes;
};

std::vector<Planned> plan(int ranks, int count, unsigned seed) {
  std::mt19937 random(seed);
  const int64_t sizes[] = {0, 1, 8, 1000, 4096, 4097, 20000, 70001, 400003};
  std::vector<Planned> messages(count);
  for (auto& message : messages) {
    message = {static_cast<int>(random() % ranks), static_cast<int>(random() % ranks), random() % 5,
               sizes[random() % std::size(sizes)]};
  }
  return messages;
}

// Every rank does its part of the plan from two threads, in an order of its own that keeps the order of each tag.
void follow(Group& group, const std::vector<Planned>& messages, unsigned seed) {
  Mailbox mail(group);
  std::vector<Flight> sends, receives(messages.size());
  std::thread sender([&] {
    std::mt19937 random(seed + static_cast<unsigned>(group.rank()));
    for (unsigned i = 0; i < messages.size(); ++i) {
      const auto& message = messages[i];
      if (message.from != group.rank()) continue;
      sends.push_back(send(mail, message.to, message.tag, content(message.bytes, i)));
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    }
  });
  std::vector<uint64_t> tags = {0, 1, 2, 3, 4};
  std::shuffle(tags.begin(), tags.end(), std::mt19937(seed * 31 + static_cast<unsigned>(group.rank())));
  for (const uint64_t tag : tags) {
    for (unsigned i = 0; i < messages.size(); ++i) {
      const auto& message = messages[i];
      if (message.to != group.rank() || message.tag != tag) continue;
      receives[i] = receive(mail, message.from, tag, message.bytes);
    }
  }
  sender.join();
  for (auto& flight : sends) flight.get();
  for (unsigned i = 0; i < messages.size(); ++i) {
    if (messages[i].to != group.rank()) continue;
    EXPECT_EQ(receives[i].get(), messages[i].from);
    EXPECT_TRUE(receives[i].data == content(messages[i].bytes, i)) << "message " << i;
  }
}

TEST(Mailbox, ThousandRandomMessagesBetweenThreadsAllArrive) {
  for (const unsigned seed : sampled({1u, 2u, 3u})) {
    const auto messages = plan(4, 1000, seed);
    run_threads(4, [&](Group& group) { follow(group, messages, seed); });
  }
}

TEST(Mailbox, ThousandRandomMessagesBetweenProcessesAllArrive) {
  const auto messages = plan(4, 1000, 11);
  run_processes(4, [&](Group& group) { follow(group, messages, 11); });
}

TEST(Mailbox, MoreThanSixteenRanksShareSmallerRings) {
  const auto messages = plan(17, 500, 5);
  run_threads(17, [&](Group& group) { follow(group, messages, 5); });
}

TEST(Mailbox, DifferentSizesFailOnBothSidesAndTheNextPairMatches) {
  for (const auto& [sent, expected] :
       {std::pair<int64_t, int64_t>{400, 800}, {0, 4}, {100000, 50000}, {9, 0}}) {
    for (const bool early : {false, true}) {
      run_threads(2, [&, sent = sent, expected = expected](Group& group) {
        Mailbox mail(group);
        const bool sends = group.rank() == 0;
        if (sends != early) sync(mail, 1 - group.rank());
        auto wrong = sends ? send(mail, 1, 7, content(sent, 0)) : receive(mail, 0, 7, expected);
        if (sends == early) sync(mail, 1 - group.rank());
        auto right = sends ? send(mail, 1, 7, content(sent, 1)) : receive(mail, 0, 7, sent);
        const std::string text = error_of(ErrorKind::config, wrong);
        expect_in("from rank 0 to rank 1 (tag 7)", text);
        expect_in("a send of " + std::to_string(sent) + " bytes", text);
        expect_in("a receive of " + std::to_string(expected) + " bytes", text);
        right.get();
        EXPECT_TRUE(right.data == content(sent, 1));
      });
    }
  }
}

TEST(Mailbox, TimeoutsNameTheOperationAndTheNextOneGoesThrough) {
  for (const int64_t bytes : {int64_t{400}, int64_t{100000}}) {
    run_threads(2, [&](Group& group) {
      Mailbox mail(group);
      if (group.rank() == 0) {
        auto lost = send(mail, 1, 7, Bytes(bytes), 0.15);
        expect_in("send of " + std::to_string(bytes) + " bytes to rank 1 (tag 7): Timed out after 0.15 s",
                  error_of(ErrorKind::comm, lost));
        sync(mail, 1);
        send(mail, 1, 7, content(bytes, 1)).get();
      } else {
        sync(mail, 0);
        auto in = receive(mail, 0, 7, bytes);  // not the message that was withdrawn
        in.get();
        EXPECT_TRUE(in.data == content(bytes, 1));
        auto lost = receive(mail, -1, 9, bytes, 0.15);
        const auto start = shm::Clock::now();
        expect_in("receive of " + std::to_string(bytes) + " bytes from any rank (tag 9): Timed out",
                  error_of(ErrorKind::comm, lost));
        EXPECT_LT(shm::Clock::now() - start, std::chrono::milliseconds(1000));
      }
      sync(mail, 1 - group.rank());
    });
  }
}

// A peer without a mailbox reads nothing, so messages for it wait in a full ring.
TEST(Mailbox, APeerMayMakeItsMailboxLate) {
  run_threads(2, [](Group& group) {
    const auto round = [&] {
      group.begin({}, in_seconds(kLong));
      group.meet();
    };
    if (group.rank() == 0) {
      Mailbox mail(group);
      std::vector<Flight> lost;
      for (int i = 0; i < 20000; ++i) lost.push_back(send(mail, 1, 1, Bytes(16), 0.05));
      for (auto& flight : lost) expect_in("Timed out", error_of(ErrorKind::comm, flight));
      auto small = send(mail, 1, 2, content(100, 4)), big = send(mail, 1, 2, content(kBig, 5));
      round();
      small.get();
      big.get();
    } else {
      round();
      Mailbox mail(group);
      auto small = receive(mail, 0, 2, 100), big = receive(mail, 0, 2, kBig);
      small.get();
      big.get();
      EXPECT_TRUE(small.data == content(100, 4) && big.data == content(kBig, 5));
    }
  });
}

void outlive(Group& group, int victim) {
  Mailbox mail(group);
  const int other = 3 - group.rank() - victim;
  if (group.rank() == victim) {
    for (int i = 0; i < 2; ++i) receive(mail, -1, 1, 0).get();
    usleep(100000);
    kill(getpid(), SIGKILL);
  }
  std::vector<Flight> flights;
  flights.push_back(send(mail, victim, 2, Bytes(8)));
  flights.push_back(send(mail, victim, 3, Bytes(kBig)));
  flights.push_back(receive(mail, victim, 2, 8));
  flights.push_back(receive(mail, -1, 2, 8));
  auto safe = receive(mail, other, 5, 8);
  send(mail, victim, 1, {}).get();
  usleep(100000);
  const auto start = shm::Clock::now();
  const std::string name = "rank " + std::to_string(victim);
  for (auto& flight : flights) expect_in("failed: " + name + " has ended", error_of(ErrorKind::comm, flight));
  EXPECT_LT(shm::Clock::now() - start, std::chrono::milliseconds(1000));
  auto late = receive(mail, victim, 2, 8);
  expect_in(name, error_of(ErrorKind::comm, late));
  auto out = send(mail, other, 5, Bytes(8));  // the others go on
  safe.get();
  out.get();
}

TEST(Mailbox, SurvivorsOfAKilledRankFailWithinASecondAndNameIt) {
  for (const int victim : {0, 1, 2})
    run_processes(3, [&](Group& group) { outlive(group, victim); }, {victim});
}

TEST(Mailbox, WhatWasSentBeforeLeavingIsReceived) {
  run_processes(3, [](Group& group) {
    Flight small;
    Mailbox mail(group);
    if (group.rank() == 1) {
      small = send(mail, 0, 1, content(64, 1));  // received after the end
      send(mail, 0, 3, content(200000, 3)).get();
      receive(mail, 0, 2, 0).get();
      return;
    }
    if (group.rank() == 2) return sync(mail, 0);
    auto any = receive(mail, -1, 9, 8), never = receive(mail, 1, 9, 8);
    auto big = receive(mail, 1, 3, 200000);
    send(mail, 1, 2, {}).get();
    expect_in("failed: rank 1 has left the group", error_of(ErrorKind::comm, never));
    small = receive(mail, 1, 1, 64);
    small.get();
    big.get();
    EXPECT_TRUE(small.data == content(64, 1) && big.data == content(200000, 3));
    EXPECT_EQ(any.result.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
    sync(mail, 2);
    expect_in("every other rank has left the group", error_of(ErrorKind::comm, any));
  });
}

TEST(Mailbox, ClosingFailsWhatIsPending) {
  run_threads(2, [](Group& group) {
    std::vector<Flight> flights;
    {
      Mailbox mail(group);
      sync(mail, 1 - group.rank());
      flights.push_back(send(mail, 1 - group.rank(), 1, Bytes(8)));
      flights.push_back(send(mail, 1 - group.rank(), 1, Bytes(kBig)));
      flights.push_back(receive(mail, 1 - group.rank(), 2, 8));
      flights.push_back(receive(mail, -1, 2, 8));
    }
    for (auto& flight : flights) expect_in("failed: ", error_of(ErrorKind::comm, flight));
  });
}

TEST(Mailbox, AbortFailsWhatIsPendingHereAndAtThePeers) {
  run_threads(2, [](Group& group) {
    Mailbox mail(group);
    auto in = receive(mail, 1 - group.rank(), 1, 8);
    auto out = send(mail, 1 - group.rank(), 2, Bytes(kBig));
    sync(mail, 1 - group.rank());
    if (group.rank() == 0) group.abort("the watchdog barked");
    for (Flight* flight : {&in, &out}) expect_in("the watchdog barked", error_of(ErrorKind::comm, *flight));
    in = send(mail, 1 - group.rank(), 1, {});
    expect_in("the watchdog barked", error_of(ErrorKind::comm, in));
  });
}

TEST(Mailbox, DoneMayPostMore) {
  run_threads(2, [](Group& group) {
    std::promise<void> finished;
    int left = 1000;
    Mailbox::Done again;
    Mailbox mail(group);
    again = [&](int peer, std::exception_ptr error) {
      if (error || --left == 0) return finished.set_value();
      mail.receive(peer, 0, nullptr, 0, in_seconds(kLong), again);
      mail.send(peer, 0, nullptr, 0, in_seconds(kLong), [](int, std::exception_ptr) {});
    };
    again(1 - group.rank(), nullptr);
    finished.get_future().get();
    EXPECT_EQ(left, 0);
    sync(mail, 1 - group.rank());
  });
}

TEST(Mailbox, RefusesRanksThatAreNotThereAndMemoryThatIsNone) {
  run_threads(1, [](Group& group) {
    Mailbox mail(group);
    const auto never = [](int, std::exception_ptr) { ADD_FAILURE(); };
    expect_in("got 1", message_of(ErrorKind::config, [&] { mail.send(1, 0, nullptr, 0, {}, never); }));
    expect_in("got -2", message_of(ErrorKind::config, [&] { mail.receive(-2, 0, nullptr, 0, {}, never); }));
    expect_in("got 8 bytes", message_of(ErrorKind::config, [&] { mail.send(0, 0, nullptr, 8, {}, never); }));
  });
}

}  // namespace
}  // namespace gossamer::test
