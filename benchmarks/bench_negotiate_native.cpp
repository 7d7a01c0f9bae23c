// What it costs that ranks agree, without torch and without executing anything: one cached operation at a time, and bursts
// of 160. Ranks are threads over queues in memory, so this is the negotiation and its thread switches alone; a network
// adds two of its messages to each. One JSON line per case; median of the rounds and 90th percentile in microseconds.
// Build and run: cmake -S cmake -B build/cpp && cmake --build build/cpp && build/cpp/bench_negotiate_native [rounds]
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "../tests/cpp/negotiate_support.h"

using namespace gossamer;
using namespace gossamer::test;

namespace {

class Countdown {
 public:
  void start(int count) { left_ = count; }
  void one_less() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--left_ == 0) news_.notify_one();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    news_.wait(lock, [&] { return left_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable news_;
  int left_ = 0;
};

void bench(int size, int burst, int rounds) {
  const auto network = std::make_shared<Network>(size);
  std::vector<std::unique_ptr<Negotiator>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<Negotiator>(
        rank, size, std::make_unique<Network::Endpoint>(network, rank), [](const std::vector<Part>&) {},
        Options{}));
  }
  std::vector<double> microseconds;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Countdown countdown;
      for (int round = -10; round < rounds; ++round) {  // the first fill the cache
        const auto start = Clock::now();
        countdown.start(burst);
        for (int i = 0; i < burst; ++i) {
          ranks[rank]->submit({request_of(Collective::allreduce, "gradient" + std::to_string(i)), nullptr,
                               [&](const Result&) { countdown.one_less(); }, -1});
        }
        countdown.wait();
        const std::chrono::duration<double, std::micro> elapsed = Clock::now() - start;
        if (rank == size - 1 && round >= 0) microseconds.push_back(elapsed.count());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const Statistics statistics = ranks[size - 1]->statistics();
  ranks[0]->shutdown();
  std::sort(microseconds.begin(), microseconds.end());
  std::printf(R"({"bench":"negotiate_native","ranks":%d,"burst":%d,"median_us":%.1f,"p90_us":%.1f,)", size,
              burst, microseconds[microseconds.size() / 2], microseconds[microseconds.size() * 9 / 10]);
  std::printf(R"("batches_per_round":%.2f,"sent_bytes_per_round":%.1f})"
              "\n",
              static_cast<double>(statistics.batches) / (rounds + 10),
              static_cast<double>(statistics.message_bytes) / (rounds + 10));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 2000;
  for (const int size : {1, 2, 4}) {
    bench(size, 1, rounds);
    bench(size, 160, rounds / 10);
  }
}
