// What ranks get if they disagree, wait for ever, lose a peer or shut down: an error with the reason, on every rank.
#include "negotiate_support.h"

#include <gtest/gtest.h>

namespace gossamer::test {
namespace {

Result answer(Pending& pending) {
  if (pending.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
    return {nullptr, ErrorKind::comm, "the test: no answer in 20 s"};
  }
  return pending.get();
}

void expect_part(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

struct Difference {
  Collective kind;
  std::function<void(Request&)> change;  // rank 1's
  const char* expected;
};

const Difference kDifferences[] = {
    {Collective::allreduce, [](Request& r) { r.kind = Collective::broadcast; },
     "kind on all ranks, got allreduce on ranks 0, 2 (a.py:1) and broadcast on rank 1 (b.py:2)"},
    {Collective::allreduce, [](Request& r) { r.dtype = "float64"; },
     "dtype on all ranks, got float32 on ranks 0, 2 (a.py:1) and float64 on rank 1 (b.py:2)"},
    {Collective::allreduce, [](Request& r) { r.device = "cuda"; },
     "device on all ranks, got cpu on ranks 0, 2 (a.py:1) and cuda on rank 1 (b.py:2)"},
    {Collective::allreduce, [](Request& r) { r.shape = {2, 2}; },
     "shape on all ranks, got [4] on ranks 0, 2 (a.py:1) and [2, 2] on rank 1 (b.py:2)"},
    {Collective::allreduce, [](Request& r) { r.op = Aggregate::max; },
     "reduction on all ranks, got sum on ranks 0, 2 (a.py:1) and max on rank 1 (b.py:2)"},
    {Collective::allreduce, [](Request& r) { r.prescale = 0.5; },
     "prescale factor on all ranks, got 1 on ranks 0, 2 (a.py:1) and 0.5 on rank 1 (b.py:2)"},
    {Collective::allreduce, [](Request& r) { r.postscale = 2; },
     "postscale factor on all ranks, got 1 on ranks 0, 2 (a.py:1) and 2 on rank 1 (b.py:2)"},
    {Collective::broadcast, [](Request& r) { r.root = 2; },
     "root rank on all ranks, got 0 on ranks 0, 2 (a.py:1) and 2 on rank 1 (b.py:2)"},
    {Collective::broadcast, [](Request& r) { r.shape = {5}; },
     "shape on all ranks, got [4] on ranks 0, 2 (a.py:1) and [5] on rank 1 (b.py:2)"},
    {Collective::reducescatter, [](Request& r) { r.op = Aggregate::average; },
     "reduction on all ranks, got sum on ranks 0, 2 (a.py:1) and average on rank 1 (b.py:2)"},
    {Collective::reducescatter, [](Request& r) { r.shape = {5}; },
     "shape on all ranks, got [4] on ranks 0, 2 (a.py:1) and [5] on rank 1 (b.py:2)"},
    {Collective::allgather, [](Request& r) { r.shape = {4, 1}; },
     "shape on all ranks, got [4] on ranks 0, 2 (a.py:1) and [4, 1] on rank 1 (b.py:2)"},
    {Collective::allgather, [](Request& r) { r.dtype = "int8"; },
     "dtype on all ranks, got float32 on ranks 0, 2 (a.py:1) and int8 on rank 1 (b.py:2)"},
    {Collective::alltoall, [](Request& r) { r.shape = {4, 7}; },
     "shape on all ranks, got [4] on ranks 0, 2 (a.py:1) and [4, 7] on rank 1 (b.py:2)"},
    {Collective::allreduce,
     [](Request& r) {
       r.group = "g";
       r.group_size = 1;
     },
     "group on all ranks, got none on ranks 0, 2 (a.py:1) and 'g' of 1 on rank 1 (b.py:2)"},
    {Collective::add_process_set, [](Request& r) { r.numbers = {0, 2}; },
     "process set on all ranks, got [0, 1] on ranks 0, 2 (a.py:1) and [0, 2] on rank 1 (b.py:2)"},
    {Collective::remove_process_set, [](Request& r) { r.numbers = {7}; },
     "process set on all ranks, got [0, 1] on ranks 0, 2 (a.py:1) and [7] on rank 1 (b.py:2)"},
};

TEST(NegotiateErrors, a_difference_fails_that_operation_on_all_ranks_with_both_sides_and_the_next_ones_work) {
  Fleet fleet(3);
  for (const bool cached : {false, true}) {
    for (const Difference& difference : kDifferences) {
      Request right = request_of(difference.kind, "x");
      right.call_site = "a.py:1";
      if (right.kind == Collective::alltoall) right.numbers = {1, 1, 2};
      if (!moves_data(right.kind)) right.numbers = {0, 1};
      Request wrong = right;
      wrong.call_site = "b.py:2";
      difference.change(wrong);
      if (cached) {
        for (Pending& one : fleet.everywhere(right)) ASSERT_EQ(answer(one).error, "");
      }
      auto beside = fleet.everywhere(request_of(Collective::allreduce, "beside"));
      std::vector<Pending> pending;
      for (int rank = 0; rank < 3; ++rank) pending.push_back(fleet.submit(rank, rank == 1 ? wrong : right));
      for (Pending& one : pending) {
        const Result result = answer(one);
        EXPECT_EQ(result.kind, ErrorKind::config);
        expect_part(difference.expected, result.error);
      }
      for (Pending& one : beside) EXPECT_EQ(answer(one).error, "");
      for (Pending& one : fleet.everywhere(right)) EXPECT_EQ(answer(one).error, "");
    }
  }
}

TEST(NegotiateErrors, messages_name_ranks_of_the_whole_job) {
  Fleet fleet(2, [](int, Options& options) { options.ranks = {3, 7}; });
  auto mine = fleet.submit(0, request_of(Collective::allreduce, "x", {1}));
  auto theirs = fleet.submit(1, request_of(Collective::allreduce, "x", {2}));
  expect_part("got [1] on rank 3 and [2] on rank 7", answer(mine).error);
  expect_part("got [1] on rank 3 and [2] on rank 7", answer(theirs).error);
}

TEST(NegotiateErrors, a_request_that_cannot_work_throws_at_once_and_fails_on_the_other_ranks) {
  Fleet fleet(2);
  const auto expect_refused = [&](const Request& wrong, const char* expected) {
    Request right = wrong;
    right.root = 0;
    right.shape = {4};
    right.element_bytes = 4;
    if (right.kind == Collective::alltoall) right.numbers = {2, 2};
    auto other = fleet.submit(0, right);
    try {
      fleet.submit(1, wrong);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, ErrorKind::config);
      expect_part(expected, error.what());
    }
    expect_part(expected, answer(other).error);
    for (Pending& one : fleet.everywhere(right)) EXPECT_EQ(answer(one).error, "");
  };
  Request broadcast = request_of(Collective::broadcast, "broadcast");
  broadcast.root = 2;
  expect_refused(broadcast, "the root must be a rank below 2, got 2");
  expect_refused(request_of(Collective::allgather, "gather", {}), "the tensor must have a dimension 0");
  expect_refused(request_of(Collective::allreduce, "reduce", {-1}), "no negative extent, got [-1]");
  Request swap = request_of(Collective::alltoall, "swap");
  for (const std::vector<int64_t>& splits : {std::vector<int64_t>{4}, {1, 2}, {5, -1}, {}}) {
    swap.numbers = splits;
    expect_refused(swap, "the splits must be 2 numbers of 0 or more with the sum 4, got ");
  }
}

TEST(NegotiateErrors, a_name_in_flight_is_refused_and_the_first_of_it_completes) {
  Fleet fleet(2);
  Request request = request_of(Collective::allreduce, "x");
  request.call_site = "a.py:1";
  auto first = fleet.submit(0, request);
  Request again = request;
  again.call_site = "b.py:2";
  try {
    fleet.submit(0, again);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind, ErrorKind::config);
    expect_part("'x' must not be submitted again while it is in flight, got b.py:2 and before that a.py:1",
                error.what());
  }
  auto other = fleet.submit(1, request);
  EXPECT_EQ(answer(first).error, "");
  EXPECT_EQ(answer(other).error, "");
}

TEST(NegotiateErrors, a_name_is_refused_until_the_rank_has_waited_also_if_it_is_complete) {
  Fleet fleet(2);
  Request request = request_of(Collective::allreduce, "x");
  request.call_site = "a.py:1";
  for (Pending& one : fleet.everywhere(request)) EXPECT_EQ(answer(one).error, "");
  try {
    fleet.ranks[1]->submit({request, nullptr, nullptr, -1});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind, ErrorKind::config);
    expect_part(
        "'x' must not be submitted twice without a wait in between, got a.py:1 and before that a.py:1",
        error.what());
  }
  for (Pending& one : fleet.everywhere(request)) EXPECT_EQ(answer(one).error, "");
}

TEST(NegotiateErrors, a_group_fails_as_a_whole_and_groups_of_other_members_do_too) {
  Fleet fleet(2);
  const auto member = [](const char* name, int64_t count) {
    return request_of(Collective::allreduce, name, {count});
  };
  for (int round = 0; round < 2; ++round) {
    auto mine = fleet.submit_group(0, {member("a", 1), member("b", 2)}, "g");
    auto theirs = fleet.submit_group(1, {member("a", 1), member("b", 3)}, "g");
    for (auto* side : {&mine, &theirs}) {
      expect_part("group 'g' fails as a whole because of its 'b'", answer((*side)[0]).error);
      expect_part("got [2] on rank 0 and [3] on rank 1", answer((*side)[1]).error);
    }
    mine = fleet.submit_group(0, {member("a", 1), member("c", 2)}, "g");
    theirs = fleet.submit_group(1, {member("a", 1), member("d", 2)}, "g");
    for (auto* side : {&mine, &theirs}) {
      for (Pending& one : *side) {
        expect_part("the same operations on all ranks, got 'c' on rank 0 and not on rank 1",
                    answer(one).error);
      }
    }
    mine = fleet.submit_group(0, {member("a", 1), member("b", 2)}, "");
    theirs = fleet.submit_group(1, {member("a", 1), member("b", 2)}, "");
    for (auto* side : {&mine, &theirs}) {
      for (Pending& one : *side) EXPECT_EQ(answer(one).error, "");
    }
  }
}

TEST(NegotiateErrors, a_failure_of_the_executor_alike_on_all_ranks_fails_its_batch_and_another_ends_all) {
  Fleet fleet(3);
  fleet.on_batch = [](int rank, const std::vector<Part>& parts) {
    const std::string& name = parts.front().response->request.name;
    if (name == "alike") raise(ErrorKind::config, "no kernel for this");
    if (name == "alone" && rank == 2) throw std::runtime_error("disk on fire");
  };
  for (Pending& one : fleet.everywhere(request_of(Collective::allreduce, "alike"))) {
    EXPECT_EQ(answer(one).error, "no kernel for this");
  }
  for (Pending& one : fleet.everywhere(request_of(Collective::allreduce, "good")))
    EXPECT_EQ(answer(one).error, "");
  auto waits = fleet.submit(0, request_of(Collective::allreduce, "waits"));
  auto alone = fleet.everywhere(request_of(Collective::allreduce, "alone"));
  EXPECT_EQ(answer(alone[0]).error, "");
  EXPECT_EQ(answer(alone[2]).error, "disk on fire");
  const Result result = answer(waits);
  EXPECT_EQ(result.kind, ErrorKind::comm);
  expect_part("rank 2 failed: disk on fire", result.error);
  EXPECT_THROW(fleet.submit(0, request_of(Collective::allreduce, "later")), Error);
}

TEST(NegotiateErrors, an_exception_of_a_callback_ends_the_negotiation_and_not_the_process) {
  Fleet fleet(2);
  auto waits = fleet.submit(0, request_of(Collective::allreduce, "waits"));
  for (int rank = 0; rank < 2; ++rank) {
    fleet.ranks[rank]->submit({request_of(Collective::allreduce, "x"), nullptr,
                               [rank](const Result&) {
                                 if (rank == 1) throw 7;
                               },
                               -1});
  }
  expect_part("rank 1 failed: an exception of unknown type", answer(waits).error);
}

TEST(NegotiateErrors, a_lost_rank_fails_everything_pending_on_every_rank_with_the_reason) {
  for (const int victim : {0, 1, 2}) {
    Fleet fleet(3);
    for (Pending& one : fleet.everywhere(request_of(Collective::allreduce, "before")))
      ASSERT_EQ(answer(one).error, "");
    std::vector<Pending> pending;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != victim) pending.push_back(fleet.submit(rank, request_of(Collective::allreduce, "waits")));
    }
    fleet.network->kill(victim);
    for (Pending& one : pending) {
      const Result result = answer(one);
      EXPECT_EQ(result.kind, ErrorKind::comm);
      expect_part("rank " + std::to_string(victim) + " is lost", result.error);
    }
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_THROW(fleet.submit(rank, request_of(Collective::allreduce, "after")), Error);
    }
  }
}

TEST(NegotiateErrors, a_rank_lost_amid_traffic_hangs_nobody) {
  for (int round = 0; round < 10; ++round) {
    Fleet fleet(3);
    std::vector<std::thread> threads;
    std::atomic<int> ended{0};
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        for (int i = 0; i < 100000; ++i) {
          try {
            auto pending = fleet.submit(rank, request_of(Collective::allreduce, "x" + std::to_string(i % 5)));
            if (rank == round % 3 && i == 20) fleet.network->kill(rank);
            if (!answer(pending).error.empty()) break;
          } catch (const Error&) {
            break;
          }
        }
        ++ended;
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(ended, 3);
  }
}

TEST(NegotiateEnds, shutdown_of_one_rank_fails_what_waits_on_the_others_and_names_it) {
  for (const int leaver : {0, 1}) {
    Fleet fleet(2);
    const int other = 1 - leaver;
    auto waits = fleet.submit(other, request_of(Collective::allreduce, "waits"));
    auto own = fleet.submit(leaver, request_of(Collective::allreduce, "own"));
    fleet.ranks[leaver]->shutdown();
    for (Pending* one : {&waits, &own}) {
      expect_part("rank " + std::to_string(leaver) + " has shut down", answer(*one).error);
    }
    EXPECT_THROW(fleet.submit(other, request_of(Collective::allreduce, "later")), Error);
    EXPECT_THROW(fleet.submit(leaver, request_of(Collective::allreduce, "later")), Error);
    fleet.ranks[leaver]->shutdown();
  }
}

TEST(NegotiateEnds, init_and_shutdown_200_times) {
  for (int round = 0; round < 200; ++round) {
    Fleet fleet(1 + round % 3);
    if (round % 2 == 0) {
      for (Pending& one : fleet.everywhere(request_of(Collective::allreduce, "")))
        ASSERT_EQ(answer(one).error, "");
    }
  }
}

TEST(NegotiateStall, it_tells_what_waits_for_whom_and_ends_all_ranks_if_asked) {
  std::mutex mutex;
  std::vector<Stalled> reports;
  Fleet fleet(3, [&](int, Options& options) {
    options.stall.warning_s = 0.02;
    options.stall.shutdown_s = 0.3;
    options.stall.report = [&](const std::vector<Stalled>& stalled) {
      const std::lock_guard<std::mutex> lock(mutex);
      reports.insert(reports.end(), stalled.begin(), stalled.end());
    };
  });
  Request request = request_of(Collective::allgather, "lonely");
  request.call_site = "train.py:12";
  for (Pending& one : fleet.everywhere(request))
    ASSERT_EQ(answer(one).error, "");  // its bits are watched too
  auto waits = fleet.submit(1, request);
  auto beside = fleet.everywhere(request_of(Collective::allreduce, "fine"));
  for (Pending& one : beside) EXPECT_EQ(answer(one).error, "");
  auto other = fleet.submit(0, request_of(Collective::barrier, ""));
  const std::string waited = answer(waits).error;
  expect_part("allgather 'lonely' has waited ", waited);
  expect_part(" ms for ranks 0, 2; rank 1 has submitted it", waited);
  expect_part("rank 1 has submitted it (train.py:12); every rank must submit it within 0.3 s",
              answer(other).error);
  const std::lock_guard<std::mutex> lock(mutex);
  ASSERT_GE(reports.size(), 2u);
  EXPECT_EQ(reports[0].name, "lonely");
  EXPECT_EQ(reports[0].missing, (std::vector<int>{0, 2}));
  EXPECT_EQ(reports[0].submitted, (std::vector<int>{1}));
  EXPECT_EQ(reports[0].call_site, "train.py:12");
  EXPECT_GE(reports[0].seconds, 0.02);
}

TEST(NegotiateTrace, phases_of_an_operation_come_in_order) {
  std::mutex mutex;
  std::map<int, std::vector<Phase>> phases;
  {
    Fleet fleet(2, [&](int rank, Options& options) {
      options.trace = [&, rank](const Moment& event) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (event.phase != Phase::rank_ready) phases[rank].push_back(event.phase);
      };
    });
    for (Pending& one : fleet.everywhere(request_of(Collective::allreduce, "x")))
      EXPECT_EQ(answer(one).error, "");
  }
  const std::vector<Phase> expected{Phase::submitted, Phase::agreed, Phase::executing, Phase::done};
  EXPECT_EQ(phases[0], expected);
  EXPECT_EQ(phases[1], expected);
}

}  // namespace
}  // namespace gossamer::test
