// What the recorder takes for one bucket of ByteGrad, without torch and without sending anything: with counters off, with
// counters (as always), and with a trace too. One JSON line per case, nanoseconds of the fastest round.
// Build and run: cmake -S cmake -B build/cpp && cmake --build build/cpp && build/cpp/bench_observe_native
#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>

#include "observe/recorder.h"

using namespace gossamer::observe;

namespace {

constexpr int kRounds = 9, kBuckets = 20000;

void fly(const char* operation) {
  Flight flight(operation, 1000);
  flight.posted();
  flight.waiting();
  flight.done();
}

// The calls that executor.cpp, engine.cpp, hops.cpp and c10d.cpp make.
void one_bucket(Recorder& recorder) {
  const uint64_t id = recorder.enter("queued: bucket", 0);
  instant("bucket queued", 0, 0, 1000);
  {
    const Scope scope(recorder, recorder.number(), /*profiled=*/false);
    context().bucket = 0;
    recorder.change(id, "bucket");
    const Span task("bucket", "task");
    {
      const Span span("gather", "memory", 1000);
    }
    {
      const Span span("encode", "codec", 1000);
    }
    fly("all_to_all");
    {
      const Span span("reduce", "codec", 1000);
    }
    fly("all_gather");
    {
      const Span span("decode", "codec", 1000);
    }
  }
  recorder.leave(id);
}

void measure(const char* name) {
  const auto recorder = std::make_shared<Recorder>();
  int64_t fastest = std::numeric_limits<int64_t>::max();
  for (int round = 0; round < kRounds; ++round) {
    const int64_t begin = now_ns();
    for (int i = 0; i < kBuckets; ++i) one_bucket(*recorder);
    fastest = std::min(fastest, (now_ns() - begin) / kBuckets);
  }
  std::printf("{\"what\": \"recorder of a bucket, %s\", \"ns\": %lld}\n", name,
              static_cast<long long>(fastest));
}

}  // namespace

int main() {
  set_counting(false);
  measure("counters off");
  set_counting(true);
  measure("counters on");
  start_trace(1 << 17);
  measure("counters on and a trace");
  stop_trace();
  return 0;
}
