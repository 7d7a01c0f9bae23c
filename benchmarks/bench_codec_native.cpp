// Throughput of the CPU codec kernels on one core, without torch: one JSON line per kernel.
// GB/s counts the bytes of float32 on the tensor side (of one row). Median of 15 runs, spread is max - min.
// Build and run: cmake -S cmake -B build/cpp && cmake --build build/cpp && build/cpp/bench_codec_native
// [numel]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "codec/codec.h"
#include "codec/codec_list.h"

using namespace gossamer;
using namespace gossamer::codec;

namespace {

struct Timing {
  double median_s, spread_s;
};

template <class Body>
Timing measure(Body body) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRepeats = 50;
  std::vector<double> seconds;
  for (int run = 0; run < 16; ++run) {
    const auto start = Clock::now();
    for (int i = 0; i < kRepeats; ++i) body();
    const double s = std::chrono::duration<double>(Clock::now() - start).count() / kRepeats;
    if (run > 0) seconds.push_back(s);  // the first run warms up
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.back() - seconds.front()};
}

void report(const char* isa, const char* codec, const char* kernel, int64_t numel, Timing timing) {
  const double gigabytes = static_cast<double>(numel) * 4e-9;
  std::printf(R"({"bench":"codec_native","isa":"%s","codec":"%s","kernel":"%s","numel":%lld,)", isa, codec,
              kernel, static_cast<long long>(numel));
  std::printf(R"("gb_per_s":%.2f,"spread_percent":%.1f})"
              "\n",
              gigabytes / timing.median_s, 100 * timing.spread_s / timing.median_s);
}

void bench(const Kernels& kernels, const char* name, Kind kind, int64_t block, int64_t numel,
           uint64_t key = 0) {
  constexpr int64_t kRows = 4;
  const Spec spec{kind, Dtype::f32, block, key};
  const Rows one{1, numel, numel}, all{kRows, numel, kRows * numel};
  const int64_t bytes = row_bytes(spec, numel);
  std::vector<float> x(kRows * numel), out(numel), scratch(numel);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
  std::vector<uint8_t> wire(kRows * bytes), reduced(bytes);
  kernels.encode(spec, Dtype::f32, x.data(), all, wire.data());

  const auto line = [&](const char* kernel, Timing timing) {
    report(kernels.name, name, kernel, numel, timing);
  };
  line("encode", measure([&] { kernels.encode(spec, Dtype::f32, x.data(), one, wire.data()); }));
  line("decode", measure([&] { kernels.decode(spec, wire.data(), one, out.data()); }));
  line("decode_add", measure([&] { kernels.decode_add(spec, wire.data(), 1, numel, numel, out.data()); }));
  line("reduce_encode_4_rows", measure([&] {
         kernels.reduce_encode(spec, wire.data(), kRows, numel, numel, 0.25, reduced.data(), scratch.data());
       }));
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t numel = argc > 1 ? std::atoll(argv[1]) : 262144;  // 1 MiB of float32
  for (const char* isa : {"scalar", "neon", "avx2", "avx512"}) {
    const Kernels* kernels = kernels_by_name(isa);
    if (kernels == nullptr) continue;
    bench(*kernels, "int8", Kind::int8, 64, numel);
    bench(*kernels, "int8_256", Kind::int8, 256, numel);
    bench(*kernels, "int8_stochastic", Kind::int8, 64, numel, 1);
    bench(*kernels, "int4", Kind::int4, 32, numel);
    bench(*kernels, "int4_64", Kind::int4, 64, numel);
    bench(*kernels, "int4_stochastic", Kind::int4, 32, numel, 1);
    bench(*kernels, "int2", Kind::int2, 64, numel);
    bench(*kernels, "onebit", Kind::onebit, 128, numel);
    bench(*kernels, "minmax_u8", Kind::minmax_u8, 1, numel);
    bench(*kernels, "bf16", Kind::bf16, 1, numel);
    bench(*kernels, "fp16", Kind::fp16, 1, numel);
    bench(*kernels, "identity", Kind::identity, 1, numel);
  }
}
