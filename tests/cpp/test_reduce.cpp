// shm/reduce.h: every type, operation and instruction set against reduce_reference.h; then what the collectives need:
// aliased outs, any split, sums that continue elsewhere.
#include "shm/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/check.h"
#include "reduce_reference.h"
#include "sampled.h"
#include "shm/reduce_kernels.h"

namespace gossamer::test {
namespace {

using namespace reference;

constexpr int kTypes = 20, kOps = 9;
constexpr double kFactors[] = {0.5, -1.25, 3.0, 0.1, 7.0};

std::vector<const char*> instruction_sets() {
  std::vector<const char*> names;
  for (const char* name : {"scalar", "neon", "avx2", "avx512"})
    if (shm::kernels_by_name(name) != nullptr) names.push_back(name);
  return names;
}

struct Restore {
  const char* name = shm::kernels().name;
  ~Restore() { shm::select_kernels(name); }
};

template <class Body>  // body(reduction)
void for_each_reduction(Body body) {
  for (int t = 0; t < kTypes; ++t)
    for (int o = 0; o < kOps; ++o) {
      const Type type = static_cast<Type>(t), sums = shm::accumulate_type(type);
      const Op op = static_cast<Op>(o);
      if (!shm::supports(type, op)) continue;
      body(Fold{type, type, op, 3, kFactors});
      if (sums == type) continue;
      body(Fold{type, sums, op, 3, kFactors});
      body(Fold{sums, type, op, 3, kFactors});
    }
}

std::string describe(const Fold& r, int64_t numel, int sources) {
  return std::string(shm::name(r.op)) + " " + shm::name(r.from) + " to " + shm::name(r.to) + ", " +
         std::to_string(sources) + " sources of " + std::to_string(numel) + ", " + shm::kernels().name;
}

// Sources and outs at odd addresses, with bytes after each out that must stay as they are.
struct Buffers {
  static constexpr int kShift = 1, kGuard = 64;
  std::vector<Bytes> memory, results;
  std::vector<const void*> sources;
  std::vector<void*> outs;

  Buffers(const Fold& r, int source_count, int out_count, int64_t numel) {
    for (int k = 0; k < source_count; ++k) {
      memory.push_back(random_elements(r.from, numel, 977 * k + numel));
      memory.back().insert(memory.back().begin(), kShift, 0);
    }
    for (const Bytes& bytes : memory) sources.push_back(bytes.data() + kShift);
    results.assign(out_count, Bytes(kShift + numel * shm::element_size(r.to) + kGuard, 0xab));
    for (Bytes& bytes : results) outs.push_back(bytes.data() + kShift);
  }
  void run(const Fold& r, int64_t numel) {
    shm::reduce(r, sources.data(), static_cast<int>(sources.size()), outs.data(),
                static_cast<int>(outs.size()), numel);
  }
};

// Tests.

TEST(Reduce, EqualsTheReferenceForEveryTypeOperationAndInstructionSet) {
  const Restore restore;
  for_each_reduction([](const Fold& r) {
    // A strip is 8 to 256 components: all of them, and one fewer and one more.
    for (int64_t numel : {0, 1, 7, 8, 9, 15, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 521})
      for (int sources : sampled({1, 2, 3, 4, 5})) {
        Buffers buffers(r, sources, 1 + numel % 3, numel);
        Bytes want(numel * shm::element_size(r.to) + 1);
        refer(r, buffers.sources, want.data(), numel);
        for (const char* name : instruction_sets()) {
          shm::select_kernels(name);
          buffers.run(r, numel);
          for (size_t k = 0; k < buffers.outs.size(); ++k) {
            expect_equal(r.to, buffers.outs[k], want.data(), numel, describe(r, numel, sources));
            for (int i = 0; i < Buffers::kGuard; ++i)
              ASSERT_EQ(*(buffers.results[k].end() - 1 - i), 0xab) << describe(r, numel, sources);
          }
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
  });
}

TEST(Reduce, AnOutMayBeAnyOfTheSources) {
  const Restore restore;
  for_each_reduction([](const Fold& r) {
    if (r.from != r.to) return;
    for (const char* name : instruction_sets()) {
      shm::select_kernels(name);
      for (int64_t numel : {5, 256, 1021})
        for (int aliased : sampled({0, 1, 2, 3})) {
          Buffers apart(r, 4, 1, numel), buffers(r, 4, 2, numel);
          apart.run(r, numel);
          buffers.outs[1] = buffers.memory[aliased].data() + Buffers::kShift;
          buffers.run(r, numel);
          for (void* out : buffers.outs) expect_equal(r.to, out, apart.outs[0], numel, describe(r, numel, 4));
        }
    }
  });
}

TEST(Reduce, EveryOutMayBeASource) {
  const Fold r{Type::f32, Type::f32, Op::sum};
  constexpr int64_t numel = 1021;
  Buffers apart(r, 5, 1, numel), buffers(r, 5, 0, numel);
  apart.run(r, numel);
  for (Bytes& bytes : buffers.memory) buffers.outs.push_back(bytes.data() + Buffers::kShift);
  buffers.run(r, numel);
  for (void* out : buffers.outs) expect_equal(r.to, out, apart.outs[0], numel, "all aliased");
}

TEST(Reduce, AnElementsResultDependsOnNeitherTheSplitNorItsNeighbours) {
  const Restore restore;
  for_each_reduction([](const Fold& r) {
    constexpr int64_t numel = 1021;
    for (const char* name : instruction_sets()) {
      shm::select_kernels(name);
      Buffers whole(r, 3, 1, numel), pieces(r, 3, 1, numel);
      whole.run(r, numel);
      int64_t begin = 0;
      for (int64_t end : {1, 2, 65, 66, 322, 1020, 1021}) {
        std::vector<const void*> sources;
        for (const void* s : pieces.sources)
          sources.push_back(static_cast<const char*>(s) + begin * shm::element_size(r.from));
        void* out = static_cast<char*>(pieces.outs[0]) + begin * shm::element_size(r.to);
        shm::reduce(r, sources.data(), 3, &out, 1, end - begin);
        begin = end;
      }
      ASSERT_EQ(whole.results, pieces.results) << describe(r, numel, 3);
    }
  });
}

TEST(Reduce, ASumMayStopAtTheAccumulatorsAndGoOn) {
  for (Type type : {Type::f16, Type::bf16, Type::e4m3fn, Type::e5m2fnuz, Type::c32, Type::f32, Type::i32}) {
    const Type sums = shm::accumulate_type(type);
    constexpr int64_t numel = 301;
    Buffers whole({type, type, Op::avg}, 4, 1, numel);
    whole.run({type, type, Op::avg, 4}, numel);
    // ((a + b) + c) on one host, then + d and the division on another.
    Buffers first({type, sums, Op::sum}, 3, 1, numel), last({type, sums, Op::sum}, 4, 1, numel);
    first.run({type, sums, Op::sum}, numel);
    last.sources.erase(last.sources.begin(), last.sources.begin() + 3);
    last.run({type, sums, Op::sum}, numel);
    Bytes got(numel * shm::element_size(type));
    const void* sources[] = {first.outs[0], last.outs[0]};
    void* out = got.data();
    shm::reduce({sums, type, Op::avg, 4}, sources, 2, &out, 1, numel);
    expect_equal(type, got.data(), whole.outs[0], numel, shm::name(type));
  }
}

float from_bits(uint32_t bits) { return at<float>(&bits, 0); }

uint32_t through(Type type, float x) {
  uint32_t code = 0;
  const void* source = &x;
  void* out = &code;
  shm::reduce({Type::f32, type, Op::sum}, &source, 1, &out, 1, 1);
  return code;
}

TEST(Reduce, SmallFloatsKeepEveryCodeAndRoundToNearestEven) {
  const Restore restore;
  for (const char* name : instruction_sets()) {
    shm::select_kernels(name);
    for (Type type : {Type::f16, Type::bf16, Type::e4m3fn, Type::e4m3fnuz, Type::e5m2, Type::e5m2fnuz}) {
      const Format f = format(type);
      const uint32_t codes = 1u << (8 * f.bytes), sign = codes / 2;
      for (uint32_t code = 0; code < codes; ++code) {
        const double x = decoded(type, code);
        const uint32_t kept = std::isnan(x) ? f.nan : code;
        ASSERT_EQ(through(type, static_cast<float>(x)), kept) << shm::name(type) << " code " << code;
        const double next = decoded(type, code + 1);
        if ((code & (sign - 1)) == sign - 1 || !std::isfinite(x) || !std::isfinite(next)) continue;
        const float half = static_cast<float>((x + next) / 2);         // exact
        if (type == Type::bf16 && std::fabs(half) < 1e-38f) continue;  // nextafter would be denormal too
        const float nearer = std::nextafter(half, static_cast<float>(x));
        const uint32_t zero = f.is_fnuz && code == sign ? 0 : code;
        ASSERT_EQ(through(type, half), code % 2 == 0 ? zero : code + 1)
            << shm::name(type) << " code " << code;
        ASSERT_EQ(through(type, nearer), zero) << shm::name(type) << " code " << code;
      }
    }
  }
}

TEST(Reduce, SmallFloatsOverflowAsTorchHasIt) {
  struct Case {
    Type type;
    float x;
    uint32_t code;
  };
  for (const Case& c :
       {Case{Type::e4m3fn, 464.0f, 0x7e}, Case{Type::e4m3fn, 480.0f, 0x7e}, Case{Type::e4m3fn, -1e9f, 0xfe},
        Case{Type::e4m3fn, HUGE_VALF, 0x7e}, Case{Type::e4m3fnuz, 247.9f, 0x7f},
        Case{Type::e4m3fnuz, 248.0f, 0x80}, Case{Type::e4m3fnuz, -HUGE_VALF, 0x80},
        Case{Type::e4m3fnuz, -0.0f, 0x00}, Case{Type::e5m2, 61439.0f, 0x7b}, Case{Type::e5m2, 61440.0f, 0x7c},
        Case{Type::e5m2, -1e9f, 0xfc}, Case{Type::e5m2fnuz, 61439.0f, 0x7f},
        Case{Type::e5m2fnuz, 61440.0f, 0x80}, Case{Type::e5m2fnuz, -1e-9f, 0x00},
        Case{Type::f16, 65519.0f, 0x7bff}, Case{Type::f16, 65520.0f, 0x7c00},
        Case{Type::bf16, from_bits(0x7f7f8000), 0x7f80}})
    EXPECT_EQ(through(c.type, c.x), c.code) << shm::name(c.type) << " of " << c.x;
}

TEST(Reduce, AnAverageOfBfloatsRoundsOnce) {
  const uint16_t a = encoded(Type::bf16, 1), b = encoded(Type::bf16, 1 + 69 / 128.0);
  const void* sources[] = {&a, &b, &b};
  uint16_t got = 0;
  void* out = &got;
  shm::reduce({Type::bf16, Type::bf16, Op::avg, 3}, sources, 3, &out, 1, 1);
  EXPECT_EQ(decoded(Type::bf16, got), 1.359375);  // from a sum that was rounded to bf16: 1.3515625
}

TEST(Reduce, PremultipliedIntegersAreCutTowardsZeroAndSaturate) {
  const int8_t x[] = {5, -5, 100, -100, 127, 0};
  const int8_t want[] = {7, -7, 127, -128, 127, 0};
  const double factor = 1.5, nan = std::nan("");
  int8_t got[6];
  const void* source = x;
  void* out = got;
  shm::reduce({Type::i8, Type::i8, Op::premul_sum, 1, &factor}, &source, 1, &out, 1, 6);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(got[i], want[i]) << i;
  shm::reduce({Type::i8, Type::i8, Op::premul_sum, 1, &nan}, &source, 1, &out, 1, 6);
  for (int8_t y : got) EXPECT_EQ(y, 0);
  shm::reduce({Type::i8, Type::i8, Op::premul_sum}, &source, 1, &out, 1, 6);  // no factors
  for (int i = 0; i < 6; ++i) EXPECT_EQ(got[i], x[i]) << i;
}

TEST(Reduce, RefusesWhatHasNoMeaningAndNamesIt) {
  const float x = 0;
  float y = 7;
  const void* source = &x;
  void* out = &y;
  const auto message = [&](const Fold& r, int sources = 1) -> std::string {
    try {
      shm::reduce(r, &source, sources, &out, 1, 1);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, ErrorKind::config);
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message({Type::f32, Type::f32, Op::band}).find("BAND"), std::string::npos);
  EXPECT_NE(message({Type::c64, Type::c64, Op::max}).find("complex64"), std::string::npos);
  EXPECT_NE(message({Type::boolean, Type::boolean, Op::avg}), "");
  EXPECT_NE(message({Type::f16, Type::bf16, Op::sum}).find("float16 and bfloat16"), std::string::npos);
  EXPECT_NE(message({Type::i8, Type::f32, Op::sum}), "");
  EXPECT_NE(message({Type::f32, Type::f32, Op::avg, 0}).find("got 0"), std::string::npos);
  EXPECT_NE(message({Type::f32, Type::f32, Op::sum}, 0).find("0 sources"), std::string::npos);
  EXPECT_NE(message({static_cast<Type>(20), static_cast<Type>(20), Op::sum}), "");
  EXPECT_NE(message({Type::f32, Type::f32, static_cast<Op>(9)}), "");
  EXPECT_EQ(y, 7);
  EXPECT_EQ(message({Type::f32, Type::f32, Op::sum}), "");
}

TEST(Reduce, SupportsWhatTheHeaderSays) {
  for (int t = 0; t < kTypes; ++t)
    for (int o = 0; o < kOps; ++o) {
      const Type type = static_cast<Type>(t);
      const Op op = static_cast<Op>(o);
      const bool bitwise = op == Op::band || op == Op::bor || op == Op::bxor;
      const bool ordered = op == Op::min || op == Op::max;
      const bool scaled = op == Op::avg || op == Op::premul_sum;
      const bool want = type == Type::boolean ? !scaled
                        : is_integer(type)    ? true
                        : is_complex(type)    ? !bitwise && !ordered
                                              : !bitwise;
      EXPECT_EQ(shm::supports(type, op), want) << shm::name(type) << " " << shm::name(op);
    }
}

}  // namespace
}  // namespace gossamer::test
