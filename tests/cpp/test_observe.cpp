// The recorder: counters that add up when operations overlap, the activity, and a trace that several threads write and that
// keeps the last events.
#include "observe/recorder.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace gossamer::test {
namespace {

using namespace observe;

void pass_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

int64_t ms_of(int64_t ns) { return ns / 1000000; }

TEST(Recorder, overlapping_operations_count_once_and_in_their_bucket) {
  const auto recorder = std::make_shared<Recorder>();
  recorder->end_step();  // from here the step is known
  {
    const Scope scope(*recorder, 1, /*profiled=*/false);
    context().bucket = 2;
    Flight first("first", 0), second("second", 0);
    first.posted();
    second.posted();
    pass_ms(20);
    first.waiting();
    first.done();
    second.waiting();
    second.done();
    pass_ms(30);
  }
  recorder->end_step();
  const auto steps = recorder->steps();
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_GE(ms_of(steps[0].communication), 20);
  EXPECT_LE(steps[0].communication, steps[0].wall - 30 * 1000000);
  ASSERT_EQ(steps[0].communication_of.size(), 3u);
  EXPECT_EQ(steps[0].communication_of[2], steps[0].communication);
  EXPECT_EQ(recorder->totals().communication, steps[0].communication);
}

TEST(Recorder, what_is_of_no_bucket_counts_only_while_its_thread_is_inside) {
  const auto recorder = std::make_shared<Recorder>();
  recorder->end_step();
  const Scope scope(*recorder, 1, /*profiled=*/false);
  Flight agreement("agreement", 0);
  agreement.posted();
  pass_ms(30);
  agreement.waiting();
  agreement.done();
  recorder->end_step();
  EXPECT_LT(ms_of(recorder->steps().at(0).communication), 15);
}

TEST(Recorder, an_operation_that_fails_is_over) {
  const auto recorder = std::make_shared<Recorder>();
  const Scope scope(*recorder, 1, /*profiled=*/false);
  context().bucket = 0;
  {
    const Flight lost("lost", 0);
    EXPECT_EQ(recorder->activity().size(), 1u);
  }
  EXPECT_TRUE(recorder->activity().empty());
  recorder->end_step();
  pass_ms(20);
  recorder->end_step();
  EXPECT_EQ(recorder->steps().at(0).communication, 0);
}

TEST(Recorder, keeps_the_last_steps_and_counts_all) {
  Recorder recorder;
  for (int step = 0; step < 251; ++step) recorder.end_step();
  EXPECT_EQ(recorder.steps().size(), Recorder::kKept);
  EXPECT_EQ(recorder.totals().steps, 250);
  recorder.clear();
  EXPECT_TRUE(recorder.steps().empty());
  EXPECT_EQ(recorder.totals().steps, 0);
}

TEST(Recorder, tells_what_waits_and_since_when) {
  Recorder recorder;
  const int64_t begin = now_ns();
  const auto id = recorder.enter("queued: bucket", 4);
  ASSERT_EQ(recorder.activity().size(), 1u);
  EXPECT_EQ(recorder.activity()[0].what, "queued: bucket");
  EXPECT_EQ(recorder.activity()[0].bucket, 4);
  EXPECT_GE(recorder.activity()[0].since_ns, begin);
  recorder.change(id, "bucket");
  EXPECT_EQ(recorder.activity()[0].what, "bucket");
  recorder.leave(id);
  EXPECT_TRUE(recorder.activity().empty());
}

TEST(Trace, threads_add_at_once_and_a_full_ring_keeps_the_last) {
  constexpr int kThreads = 4, kEach = 500, kKept = 300;
  const auto recorder = std::make_shared<Recorder>();
  start_trace(kKept);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&recorder, thread] {
      const Scope scope(*recorder, static_cast<uint32_t>(thread + 1), /*profiled=*/false);
      for (int i = 0; i < kEach; ++i) {
        const Span span("span", "test", i);
        instant("a name that is far longer than what an event has room for, which is cut", 0, i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const auto taken = stop_trace();
  EXPECT_EQ(taken.events.size(), static_cast<size_t>(kKept));
  EXPECT_EQ(taken.replaced, static_cast<uint64_t>(2 * kThreads * kEach - kKept));
  for (const auto& event : taken.events) {
    EXPECT_LT(std::strlen(event.name.data()), event.name.size());
    EXPECT_LE(event.begin_ns, event.end_ns);
  }
}

TEST(Trace, an_operation_is_one_span_unless_something_came_between) {
  const auto recorder = std::make_shared<Recorder>();
  start_trace(100);
  {
    const Scope scope(*recorder, 7, /*profiled=*/false);
    Flight together("together", 5);
    together.posted();
    together.waiting();
    together.done();
    Flight apart("apart", 5);
    apart.posted();
    {
      const Span between("between", "test");
    }
    apart.waiting();
    apart.done();
  }
  {
    const Span outside("outside", "test");
  }
  std::vector<std::string> names;
  for (const auto& event : stop_trace().events) {
    names.emplace_back(event.name.data());
    EXPECT_EQ(event.thread, 7u);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"together", "between", "apart", "apart"}));
  EXPECT_TRUE(stop_trace().events.empty());
}

TEST(Trace, no_counters_and_no_trace_record_nothing) {
  const auto recorder = std::make_shared<Recorder>();
  set_counting(false);
  {
    const Scope scope(*recorder, 1, /*profiled=*/false);
    Flight flight("flight", 0);
    EXPECT_TRUE(recorder->activity().empty());
    flight.posted();
    const Waiting waiting(*recorder, "wait", /*profiled=*/false);
    const Span span("span", "test");
  }
  recorder->end_step();
  recorder->end_step();
  set_counting(true);
  EXPECT_TRUE(recorder->steps().empty());
  EXPECT_TRUE(stop_trace().events.empty());
}

}  // namespace
}  // namespace gossamer::test
