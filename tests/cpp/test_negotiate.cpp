// What ranks get that submit the same operations: one order, the sizes of all ranks, cached agreements, fused batches.
#include "negotiate_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace gossamer::test {
namespace {

Result get(Pending& pending) {
  if (pending.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
    return {nullptr, ErrorKind::comm, "the test: no answer in 20 s"};
  }
  return pending.get();
}

void expect_done(std::vector<Pending> pending) {
  for (Pending& one : pending) EXPECT_EQ(get(one).error, "");
}

std::vector<std::string> flat(const Batches& batches) {
  std::vector<std::string> names;
  for (const auto& batch : batches) names.insert(names.end(), batch.begin(), batch.end());
  return names;
}

TEST(Negotiate, every_rank_executes_shuffled_submissions_in_one_order_and_the_same_batches) {
  for (const int size : {1, 2, 3, 4}) {
    const unsigned seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed) + ", ranks " + std::to_string(size));
    constexpr int kOperations = 120, kRounds = 12;
    Fleet fleet(size, [&](int rank, Options& options) {
      options.cache_capacity = 100;  // fewer than names, so some are dropped in every round
      options.fusing.bytes = rank == 0 ? 4096 : 16 * rank;
    });
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        std::mt19937 random(seed + static_cast<unsigned>(rank));
        for (int round = 0; round < kRounds; ++round) {
          std::vector<int> order(kOperations);
          std::iota(order.begin(), order.end(), 0);
          std::shuffle(order.begin(), order.end(), random);
          std::vector<Pending> pending;
          for (const int i : order) {
            Request request = request_of(static_cast<Collective>(i % 5), "op" + std::to_string(i),
                                         {4 + i % 7 + (i % 31 == round), 2});
            if (request.kind == Collective::alltoall) {
              request.numbers.assign(size, 0);
              request.numbers[0] = request.shape[0];
            }
            if (i % 3 == 0) request.dtype = "float16";
            pending.push_back(fleet.submit(rank, std::move(request)));
          }
          expect_done(std::move(pending));
        }
      });
    }
    for (auto& thread : threads) thread.join();
    fleet.ranks[0]->shutdown();
    for (auto& rank : fleet.ranks) rank->shutdown();
    EXPECT_EQ(flat(fleet.batches[0]).size(), static_cast<size_t>(kOperations * kRounds));
    for (int rank = 1; rank < size; ++rank) EXPECT_EQ(fleet.batches[rank], fleet.batches[0]);
    if (size == 4) {
      EXPECT_GT(fleet.ranks[1]->statistics().cached, 0u);
    }
  }
}

TEST(Negotiate, agreed_sizes_of_all_ranks_come_with_allgather_and_alltoall) {
  Fleet fleet(3);
  for (int again = 0; again < 3; ++again) {  // the second time from the cache
    std::vector<Pending> gathers, swaps;
    for (int rank = 0; rank < 3; ++rank) {
      gathers.push_back(fleet.submit(rank, request_of(Collective::allgather, "gather", {rank, 5})));
      Request swap = request_of(Collective::alltoall, "swap", {3 + rank});
      swap.numbers = {1, 2, rank};
      swaps.push_back(fleet.submit(rank, swap));
    }
    for (Pending& one : gathers) {
      const Result result = get(one);
      ASSERT_EQ(result.error, "");
      EXPECT_EQ(result.response->sizes, (std::vector<int64_t>{0, 1, 2}));
      EXPECT_EQ(result.response->bytes, 3 * 5 * 4);
    }
    for (Pending& one : swaps) {
      const Result result = get(one);
      ASSERT_EQ(result.error, "");
      EXPECT_EQ(result.response->sizes, (std::vector<int64_t>{1, 2, 0, 1, 2, 1, 1, 2, 2}));
    }
  }
  EXPECT_EQ(fleet.ranks[2]->statistics().cached, 4u);
}

TEST(Negotiate, every_kind_on_tensors_is_cached_and_a_change_of_it_is_agreed_anew) {
  Fleet fleet(2);
  for (const Collective kind : {Collective::allreduce, Collective::allgather, Collective::broadcast,
                                Collective::alltoall, Collective::reducescatter}) {
    Request request = request_of(kind, name(kind), {6});
    if (kind == Collective::alltoall) request.numbers = {2, 4};
    const auto bits = [&](const Request& what) {
      const uint64_t before = fleet.ranks[1]->statistics().cached;
      expect_done(fleet.everywhere(what));
      return fleet.ranks[1]->statistics().cached - before;
    };
    EXPECT_EQ(bits(request), 0u) << name(kind);
    EXPECT_EQ(bits(request), 1u) << name(kind);
    Request longer = request;
    longer.shape = {6, 3};
    EXPECT_EQ(bits(longer), 0u) << name(kind);
    EXPECT_EQ(bits(longer), 1u) << name(kind);
    Request other = request;
    other.dtype = "int32";
    other.postscale = 0.5;
    EXPECT_EQ(bits(other), 0u) << name(kind);
    EXPECT_EQ(bits(other), 1u) << name(kind);
  }
}

TEST(Negotiate, without_a_cache_or_with_one_of_one_entry_all_still_agree) {
  for (const int capacity : {0, 1}) {
    Fleet fleet(2, [&](int, Options& options) { options.cache_capacity = capacity; });
    for (int round = 0; round < 20; ++round) {
      std::vector<Pending> all;
      for (const char* name : {"a", "b", "c"}) {
        for (Pending& one : fleet.everywhere(request_of(Collective::allreduce, name)))
          all.push_back(std::move(one));
      }
      expect_done(std::move(all));
    }
    if (capacity == 0) {
      EXPECT_EQ(fleet.ranks[1]->statistics().cached, 0u);
    }
  }
}

TEST(Negotiate, a_bit_sent_while_its_slot_gets_another_occupant_is_sent_again_in_full) {
  Fleet fleet(2, [](int, Options& options) { options.cache_capacity = 1; });
  expect_done(fleet.everywhere(request_of(Collective::allreduce, "old")));
  // Rank 0 decides on "new" in a batch that keeps both ranks busy, while rank 1 has a bit for "old" on its way.
  for (int round = 0; round < 200; ++round) {
    auto first = fleet.submit(1, request_of(Collective::allreduce, "new" + std::to_string(round)));
    auto second = fleet.submit(0, request_of(Collective::allreduce, "new" + std::to_string(round)));
    auto third = fleet.submit(1, request_of(Collective::allreduce, "old"));
    EXPECT_EQ(get(first).error, "");
    EXPECT_EQ(get(second).error, "");
    auto fourth = fleet.submit(0, request_of(Collective::allreduce, "old"));
    EXPECT_EQ(get(third).error, "");
    EXPECT_EQ(get(fourth).error, "");
  }
}

TEST(Negotiate, a_group_stays_whole_above_the_threshold_and_apart_from_others_if_asked) {
  for (const bool fuse_groups : {true, false}) {
    Fleet fleet(2, [&](int, Options& options) {
      options.fusing = {64, fuse_groups};
      options.window = std::chrono::microseconds(0);
    });
    std::vector<Request> group;
    for (int i = 0; i < 8; ++i)
      group.push_back(request_of(Collective::allreduce, "g_" + std::to_string(i), {8}));
    std::vector<Request> reversed(group.rbegin(), group.rend());
    for (int round = 0; round < 3; ++round) {
      auto mine = fleet.submit_group(0, group, "g");
      auto theirs = fleet.submit_group(1, reversed, "g");
      expect_done(std::move(mine));
      expect_done(std::move(theirs));
    }
    for (auto& rank : fleet.ranks) rank->shutdown();
    ASSERT_EQ(fleet.batches[0].size(), 3u);
    for (const auto& batch : fleet.batches[1]) EXPECT_EQ(batch.size(), 8u);
  }
}

TEST(Negotiate, a_burst_like_the_last_is_held_until_it_is_whole_or_somebody_waits) {
  Fleet fleet(2, [](int, Options& options) { options.window = std::chrono::seconds(20); });
  const auto burst_of_four = [&] {
    std::vector<Request> group;
    for (int i = 0; i < 4; ++i) group.push_back(request_of(Collective::allreduce, "g" + std::to_string(i)));
    auto mine = fleet.submit_group(0, group, "g");
    auto theirs = fleet.submit_group(1, group, "g");
    expect_done(std::move(mine));
    expect_done(std::move(theirs));
  };
  burst_of_four();
  auto alone = fleet.everywhere(request_of(Collective::allreduce, "alone"));
  EXPECT_EQ(alone[0].wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  for (auto& rank : fleet.ranks) rank->hurry();
  expect_done(std::move(alone));

  burst_of_four();
  std::vector<Pending> four;
  for (int i = 0; i < 4; ++i) {
    for (auto& pending : fleet.everywhere(request_of(Collective::allreduce, "of four " + std::to_string(i))))
      four.push_back(std::move(pending));
  }
  expect_done(std::move(four));
  for (auto& rank : fleet.ranks) rank->shutdown();
  for (const auto& batches : fleet.batches) EXPECT_EQ(batches.back().size(), 4u);
}

std::vector<Agreed> agreed(const Request& request) {
  auto response = std::make_shared<Response>();
  response->request = request;
  response->bytes = element_count(request) * request.element_bytes;
  return {{response, false}};
}

std::vector<size_t> batch_sizes(const std::vector<Request>& requests, const Fusing& fusing) {
  std::vector<std::vector<Agreed>> units;
  for (const Request& request : requests) units.push_back(agreed(request));
  std::vector<size_t> sizes;
  for (const auto& batch : fuse(std::move(units), fusing)) sizes.push_back(batch.size());
  return sizes;
}

TEST(NegotiateFusion, only_operations_alike_are_fused_and_none_beyond_the_threshold) {
  using Sizes = std::vector<size_t>;
  const Request a = request_of(Collective::allreduce, "a");  // 16 bytes
  Request half = a, scaled = a, device = a, op = a;
  half.dtype = "float16";
  scaled.prescale = 0.5;
  device.device = "cuda";
  op.op = Aggregate::max;
  EXPECT_EQ(batch_sizes({a, a, a}, {48, true}), Sizes{3});
  EXPECT_EQ(batch_sizes({a, a, a}, {47, true}), (Sizes{2, 1}));
  EXPECT_EQ(batch_sizes({a, a, a}, {0, true}), (Sizes{1, 1, 1}));
  EXPECT_EQ(batch_sizes({a, half, a, scaled, a, device, op, a}, {1000, true}), (Sizes{4, 1, 1, 1, 1}));
  const Request broadcast = request_of(Collective::broadcast, "b"),
                swap = request_of(Collective::alltoall, "s");
  EXPECT_EQ(batch_sizes({broadcast, swap, broadcast, swap}, {1000, true}), (Sizes{1, 1, 1, 1}));
  const Request gather = request_of(Collective::allgather, "g"),
                scatter = request_of(Collective::reducescatter, "r");
  EXPECT_EQ(batch_sizes({gather, scatter, gather, scatter}, {1000, true}), (Sizes{2, 2}));
}

TEST(NegotiateWire, a_message_survives_its_bytes_and_a_damaged_one_is_an_error) {
  Request request = request_of(Collective::alltoall, "name", {3, 1});
  request.numbers = {1, 2};
  request.call_site = "train.py:7";
  request.prescale = 0.1;
  Response response;
  response.request = request;
  response.sizes = {1, 2, 3, 4};
  response.error = "wrong";
  const Bytes bytes = encode(Decision{7, {{{3, 2, {}}, {-1, 0, {response}}}}});
  const auto decision = std::get<Decision>(decode(bytes));
  EXPECT_EQ(decision.sequence, 7u);
  ASSERT_EQ(decision.batches.size(), 1u);
  EXPECT_EQ(decision.batches[0][0].slots, 2);
  EXPECT_TRUE(same(decision.batches[0][1].responses[0].request, request));
  EXPECT_EQ(decision.batches[0][1].responses[0].sizes, response.sizes);
  EXPECT_EQ(decision.batches[0][1].responses[0].error, "wrong");
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_THROW(decode(Bytes(bytes.begin(), bytes.begin() + static_cast<long>(length))), Error) << length;
  }
  Bytes longer = bytes, unknown = bytes;
  longer.push_back(0);
  unknown[0] = 200;
  EXPECT_THROW(decode(longer), Error);
  EXPECT_THROW(decode(unknown), Error);
}

TEST(Negotiate, joined_ranks_take_part_in_allreduces_and_learn_who_came_last) {
  Fleet fleet(3);
  std::atomic<int> zeros{0};
  fleet.on_batch = [&](int, const std::vector<Part>& parts) {
    for (const Part& part : parts) zeros += part.operation == nullptr;
  };
  expect_done(fleet.everywhere(request_of(Collective::allreduce, "cached")));
  for (int round = 0; round < 2; ++round) {
    zeros = 0;
    std::vector<Pending> joins;
    joins.push_back(fleet.submit(1, request_of(Collective::join, "")));
    for (const char* name : {"cached", "uncached"}) {
      auto first = fleet.submit(0, request_of(Collective::allreduce, name));
      auto last = fleet.submit(2, request_of(Collective::allreduce, name));
      EXPECT_EQ(get(first).error, "");
      EXPECT_EQ(get(last).error, "");
    }
    joins.push_back(fleet.submit(0, request_of(Collective::join, "")));
    auto alone = fleet.submit(2, request_of(Collective::allreduce, "alone"));
    EXPECT_EQ(get(alone).error, "");
    auto gather = fleet.submit(2, request_of(Collective::allgather, "gather"));
    const std::string error = get(gather).error;
    EXPECT_NE(error.find("ranks 0, 1 have joined"), std::string::npos) << error;
    joins.push_back(fleet.submit(2, request_of(Collective::join, "")));
    for (Pending& join : joins) {
      const Result result = get(join);
      ASSERT_EQ(result.error, "");
      EXPECT_EQ(result.response->value, 2);
    }
    EXPECT_EQ(zeros, 4);
    expect_done(fleet.everywhere(request_of(Collective::allgather, "gather")));
    expect_done(fleet.everywhere(request_of(Collective::allreduce, "cached")));
  }
}

TEST(Negotiate, a_refused_join_fails_on_every_rank_and_leaves_nobody_joined) {
  Fleet fleet(3);
  for (int round = 0; round < 2; ++round) {
    Request refused = request_of(Collective::join, "");
    refused.refusal = "no such place";
    std::vector<Pending> joins;
    joins.push_back(fleet.submit(1, refused));
    auto first = fleet.submit(0, request_of(Collective::allreduce, "x"));
    auto last = fleet.submit(2, request_of(Collective::allreduce, "x"));
    EXPECT_EQ(get(first).error, "");
    EXPECT_EQ(get(last).error, "");
    joins.push_back(fleet.submit(0, request_of(Collective::join, "")));
    joins.push_back(fleet.submit(2, request_of(Collective::join, "")));
    for (Pending& join : joins) {
      const std::string error = get(join).error;
      EXPECT_NE(error.find("was refused by rank 1: no such place"), std::string::npos) << error;
    }
    expect_done(fleet.everywhere(request_of(Collective::allgather, "gather")));
  }
}

TEST(Negotiate, a_barrier_waits_for_all_ranks_and_process_sets_get_one_number) {
  Fleet fleet(2);
  auto early = fleet.submit(0, request_of(Collective::barrier, ""));
  EXPECT_EQ(early.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  auto late = fleet.submit(1, request_of(Collective::barrier, ""));
  EXPECT_EQ(get(early).error, "");
  EXPECT_EQ(get(late).error, "");
  for (int64_t id = 1; id < 4; ++id) {
    Request request = request_of(Collective::add_process_set, "");
    request.numbers = {0, id};
    for (Pending& one : fleet.everywhere(request)) EXPECT_EQ(get(one).response->value, id);
  }
}

TEST(Negotiate, unnamed_operations_line_up_after_a_barrier_that_follows_a_missed_one) {
  Fleet fleet(2);
  expect_done(fleet.everywhere(request_of(Collective::allreduce, "")));
  Request lonely = request_of(Collective::allreduce, "");
  lonely.call_site = "train.py:3";
  auto missed = fleet.submit(1, lonely);
  expect_done(fleet.everywhere(request_of(Collective::barrier, "")));
  const std::string error = get(missed).error;
  EXPECT_NE(error.find("submitted by rank 1 (train.py:3) and not by rank 0"), std::string::npos) << error;
  for (int i = 0; i < 5; ++i) expect_done(fleet.everywhere(request_of(Collective::allreduce, "")));
}

TEST(Negotiate, an_operation_that_one_rank_refuses_fails_on_all_and_the_unnamed_after_it_line_up) {
  Fleet fleet(2);
  for (int round = 0; round < 3; ++round) {
    auto mine = fleet.submit(0, request_of(Collective::allreduce, ""));
    Request request = request_of(Collective::allreduce, "");
    request.call_site = "loss.py:9";
    fleet.ranks[1]->refuse(request, "dtype float8 cannot be summed");
    const Result result = get(mine);
    EXPECT_EQ(result.kind, ErrorKind::config);
    EXPECT_NE(result.error.find("refused by rank 1 (loss.py:9): dtype float8 cannot be summed"),
              std::string::npos)
        << result.error;
    expect_done(fleet.everywhere(request_of(Collective::allreduce, "")));
  }
}

}  // namespace
}  // namespace gossamer::test
