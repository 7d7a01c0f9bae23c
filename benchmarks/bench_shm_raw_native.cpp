// The raw limit of an all-reduce in shared memory: what nothing on this machine can beat by much.
// Forked ranks, every buffer in one shared anonymous mapping; rank r sums slice r of all buffers in rank order
// and stores the sum into all of them, between two barriers. It uses nothing of Gossamer: a peer, not a part.
// bench_allreduce.py compiles and runs it. Alone: g++ -O3 benchmarks/bench_shm_raw_native.cpp -o /tmp/raw
// && /tmp/raw [ranks bytes batches calls]; one JSON line, the seconds of a call in each batch on the slowest
// rank. Exit code 3 if the processor has no AVX2.
#if defined(__x86_64__)
#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMostRanks = 64, kMostBatches = 1024;
constexpr auto kSpin = std::chrono::microseconds(50);

struct Job {
  int ranks;
  int64_t bytes;
  int batches, calls;
};

struct Shared {
  alignas(64) std::atomic<uint32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};
  alignas(64) std::atomic<uint32_t> sleepers{0};
  double seconds[kMostBatches][kMostRanks];
};

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

// Spinning helps only if the rank waited for has a core of its own.
class Barrier {
 public:
  Barrier(Shared* shared, int ranks, bool spins) : shared_(shared), ranks_(ranks), spins_(spins) {}

  void wait() {
    const uint32_t mine = shared_->generation.load();
    if (shared_->arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks_)) {
      shared_->arrived.store(0);
      shared_->generation.store(mine + 1);
      // In the one order of all these operations a sleeper counts itself before it sees the old generation.
      if (shared_->sleepers.load() > 0) futex(&shared_->generation, FUTEX_WAKE, INT32_MAX);
      return;
    }
    if (spins_ && passed_while_spinning(mine)) return;
    shared_->sleepers.fetch_add(1);
    while (shared_->generation.load() == mine) futex(&shared_->generation, FUTEX_WAIT, mine);
    shared_->sleepers.fetch_sub(1);
  }

 private:
  bool passed_while_spinning(uint32_t mine) const {
    const auto end = Clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; ++i) {
        if (shared_->generation.load(std::memory_order_acquire) != mine) return true;
        _mm_pause();
      }
    } while (Clock::now() < end);
    return false;
  }

  Shared* shared_;
  int ranks_;
  bool spins_;
};

__attribute__((target("avx2"))) void sum_into_all(float* const* buffers, int ranks, int64_t begin,
                                                  int64_t end) {
  constexpr int64_t kStep = 32;
  int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    __m256 sum[4];
    for (int k = 0; k < 4; ++k) sum[k] = _mm256_loadu_ps(buffers[0] + i + 8 * k);
    for (int r = 1; r < ranks; ++r) {
      for (int k = 0; k < 4; ++k) sum[k] = _mm256_add_ps(sum[k], _mm256_loadu_ps(buffers[r] + i + 8 * k));
    }
    for (int r = 0; r < ranks; ++r) {
      for (int k = 0; k < 4; ++k) _mm256_storeu_ps(buffers[r] + i + 8 * k, sum[k]);
    }
  }
  for (; i < end; ++i) {
    float sum = buffers[0][i];
    for (int r = 1; r < ranks; ++r) sum += buffers[r][i];
    for (int r = 0; r < ranks; ++r) buffers[r][i] = sum;
  }
}

class Rank {
 public:
  Rank(int rank, const Job& job, Shared* shared, float* memory, bool spins)
      : rank_(rank), job_(job), shared_(shared), barrier_(shared, job.ranks, spins), numel_(job.bytes / 4) {
    for (int r = 0; r < job.ranks; ++r) buffers_.push_back(memory + r * numel_);
    begin_ = slice_start(rank);
    end_ = slice_start(rank + 1);
  }

  // False if the sum is wrong. The values are small integers, which no order of adding rounds.
  bool run() {
    float* mine = buffers_[rank_];
    for (int64_t i = 0; i < numel_; ++i) mine[i] = static_cast<float>(i % 251 + rank_);
    all_reduce();
    const int64_t of_ranks = job_.ranks * (job_.ranks - 1) / 2;
    for (int64_t i = 0; i < numel_; ++i) {
      if (mine[i] != static_cast<float>(i % 251 * job_.ranks + of_ranks)) return false;
    }
    std::fill(mine, mine + numel_, 0.0f);
    all_reduce();
    for (int batch = 0; batch < job_.batches; ++batch) {
      barrier_.wait();
      const auto start = Clock::now();
      for (int i = 0; i < job_.calls; ++i) all_reduce();
      const double s = std::chrono::duration<double>(Clock::now() - start).count();
      shared_->seconds[batch][rank_] = s / job_.calls;
    }
    return true;
  }

 private:
  // Whole cache lines, so that no line has two writers.
  int64_t slice_start(int rank) const {
    constexpr int64_t kLine = 16;
    return rank == job_.ranks ? numel_ : numel_ * rank / job_.ranks / kLine * kLine;
  }

  void all_reduce() {
    barrier_.wait();
    sum_into_all(buffers_.data(), job_.ranks, begin_, end_);
    barrier_.wait();
  }

  int rank_;
  Job job_;
  Shared* shared_;
  Barrier barrier_;
  int64_t numel_, begin_ = 0, end_ = 0;
  std::vector<float*> buffers_;
};

bool all_succeed(const std::vector<pid_t>& children) {
  bool good = true;
  for (size_t left = children.size(); left > 0; --left) {
    int status = 0;
    wait(&status);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    good = false;
    for (const pid_t child : children) kill(child, SIGKILL);  // they would wait for the failed one for ever
  }
  return good;
}

bool spins_pay(int ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof cores, &cores) == 0 && ranks <= CPU_COUNT(&cores);
}

bool run(const Job& job) {
  const size_t total = sizeof(Shared) + static_cast<size_t>(job.bytes) * job.ranks;
  void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  Shared* shared = new (memory) Shared;
  float* buffers = reinterpret_cast<float*>(shared + 1);
  std::vector<pid_t> children;
  for (int rank = 0; rank < job.ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) _exit(Rank(rank, job, shared, buffers, spins_pay(job.ranks)).run() ? 0 : 1);
    if (child > 0) children.push_back(child);
    if (child < 0) return false;
  }
  if (!all_succeed(children)) return false;
  std::vector<double> seconds;
  for (int batch = 0; batch < job.batches; ++batch) {
    const double* ranks = shared->seconds[batch];
    seconds.push_back(*std::max_element(ranks, ranks + job.ranks));
  }
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  std::printf(R"({"ranks":%d,"bytes":%lld,"calls":%d,"median_us":%.3f,"seconds":[)", job.ranks,
              static_cast<long long>(job.bytes), job.calls, 1e6 * sorted[sorted.size() / 2]);
  for (size_t i = 0; i < seconds.size(); ++i) std::printf("%s%.9f", i ? "," : "", seconds[i]);
  std::printf("]}\n");
  std::fflush(stdout);  // before the next fork copies what is left
  return munmap(memory, total) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (!__builtin_cpu_supports("avx2")) {
    std::fprintf(stderr, "bench_shm_raw_native: needs a processor with AVX2\n");
    return 3;
  }
  std::vector<Job> jobs;
  if (argc == 5) {
    jobs.push_back({std::atoi(argv[1]), std::atoll(argv[2]), std::atoi(argv[3]), std::atoi(argv[4])});
  } else {
    for (int ranks : {2, 4}) {
      for (int64_t bytes = 4 << 10; bytes <= 64 << 20; bytes *= 4)
        jobs.push_back({ranks, bytes, 11, bytes < (1 << 20) ? 500 : 5});
    }
  }
  for (const Job& job : jobs) {
    const bool fits = job.ranks >= 1 && job.ranks <= kMostRanks && job.batches >= 1 &&
                      job.batches <= kMostBatches && job.calls >= 1 && job.bytes >= 0;
    if (!fits || !run(job)) {
      std::fprintf(stderr, "bench_shm_raw_native: a rank failed, summed wrongly, or the arguments are bad\n");
      return 1;
    }
  }
}
#else
#include <cstdio>

int main() {
  std::fprintf(stderr, "bench_shm_raw_native: needs a processor with AVX2\n");
  return 3;
}
#endif
