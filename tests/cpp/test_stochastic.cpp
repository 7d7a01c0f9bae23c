// Stochastic rounding of int8 and int4: codes by the definition, written out here again, from numbers that depend only on
// key, row and place; unbiased means; and the quality of the numbers.
#include "codec_support.h"

namespace gossamer::test {
namespace {

constexpr uint64_t kKey = 0x0123456789abcdef;

Spec stochastic(Kind kind, int64_t block, uint64_t key) { return {kind, Dtype::f32, block, key}; }

// docs/codecs.md, "Stochastic rounding".
uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
uint32_t scramble(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}
double fraction(uint64_t key, int64_t row, int64_t i) {
  const uint64_t row_key = mix64(key ^ mix64(static_cast<uint64_t>(row)));
  const auto index = static_cast<uint32_t>(i / 32 * 16 + i % 16);
  const uint32_t word =
      scramble(scramble(index + static_cast<uint32_t>(row_key)) ^ static_cast<uint32_t>(row_key >> 32));
  return ((i % 32 < 16 ? word & 0xffff : word >> 16) + 0.5) / 65536;
}

// The values of row `row`'s codes, in units of the block's scale.
std::vector<double> reference_int8(const std::vector<float>& x, int64_t block, int64_t row) {
  std::vector<double> levels;
  for (size_t i = 0; i < x.size(); ++i) {
    const float absmax = absmax_of(x, i / block * block, (i / block + 1) * block);
    const float peak = from_bits((to_bits(absmax) + 0xffff) >> 16 << 16);  // bfloat16, away from zero
    const float v = x[i] * (127.0f / peak);
    const float sum = v + static_cast<float>(fraction(kKey, row, static_cast<int64_t>(i)));
    levels.push_back(std::min(127.0f, std::max(-127.0f, std::floor(sum))));
  }
  return levels;
}

std::vector<double> levels_on_the_wire(const Spec& spec, const uint8_t* row, int64_t numel) {
  const int64_t blocks = (numel + spec.block - 1) / spec.block;
  std::vector<double> levels;
  for (int64_t i = 0; i < numel; ++i) {
    if (spec.kind == Kind::int8) {
      levels.push_back(static_cast<int8_t>(row[(2 * blocks + 15) / 16 * 16 + i]));
    } else {
      const int k = (row[(2 * blocks + 15) / 16 * 16 + i / 2] >> i % 2 * 4 & 15) - 8;
      levels.push_back(k * (6 + std::abs(k)));
    }
  }
  return levels;
}

TEST(Stochastic, Int8CodesAreTheFloorOfValuePlusFractionInEveryRow) {
  const Spec spec = stochastic(Kind::int8, 64, kKey);
  for (const Kernels* kernels : all_kernels())
    for (int64_t numel : {1, 31, 63, 64, 65, 1021}) {
      const auto x = make_values(3 * numel, Temper::ordinary, 83);
      const Bytes wire = encode(*kernels, spec, Dtype::f32, as_bytes(Dtype::f32, x), {3, numel, 3 * numel});
      for (int64_t row = 0; row < 3; ++row) {
        const std::vector<float> part(x.begin() + row * numel, x.begin() + (row + 1) * numel);
        EXPECT_EQ(levels_on_the_wire(spec, wire.data() + row * codec::row_bytes(spec, numel), numel),
                  reference_int8(part, 64, row))
            << kernels->name << " numel " << numel << " row " << row;
      }
    }
}

TEST(Stochastic, Int4CodesAreTheLevelBelowOrTheOneAboveByTheFraction) {
  const Spec spec = stochastic(Kind::int4, 32, kKey);
  const int64_t numel = 1021;
  const auto x = make_values(numel, Temper::ordinary, 89);
  for (const Kernels* kernels : all_kernels()) {
    const Bytes wire = encode(*kernels, spec, Dtype::f32, as_bytes(Dtype::f32, x), {1, numel, numel});
    const auto levels = levels_on_the_wire(spec, wire.data(), numel);
    for (int64_t i = 0; i < numel; ++i) {
      const double v = std::fabs(x[i] / get(Dtype::bf16, wire.data(), i / 32));
      int j = 0;
      while ((j + 1) * (7 + j) <= v) ++j;
      const double low = j * (6 + j), share = (v - low) / (2 * j + 7), u = fraction(kKey, 0, i);
      ASSERT_LE(v, 91 * (1 + 1e-6)) << "would be clamped";
      if (std::fabs(share - u) < 1e-5) continue;  // rounding of float32 decides
      const double expected = u < share ? (j + 1) * (7 + j) : low;
      ASSERT_EQ(std::fabs(levels[i]), expected)
          << kernels->name << " element " << i << " v " << v << " u " << u;
      ASSERT_TRUE(levels[i] == 0 || (levels[i] < 0) == (x[i] / get(Dtype::bf16, wire.data(), i / 32) < 0));
    }
  }
}

// Where float32 has rounded the quotient of a denormal scale down, the largest magnitude is more than 91 scales.
TEST(Stochastic, Int4IsNeverBeyondLevel91) {
  const float peak = from_bits(91 * 65536 + 45);  // 91 of the scale 2^-133, and a little
  const int64_t numel = 1 << 15;
  std::vector<float> x(numel);
  for (int64_t i = 0; i < numel; ++i) x[i] = i % 3 == 0 ? -peak : peak;
  for (const Kernels* kernels : all_kernels())
    for (uint64_t key = 1; key <= 16; ++key) {
      const Spec spec = stochastic(Kind::int4, 32, key);
      const Bytes wire = encode(*kernels, spec, Dtype::f32, as_bytes(Dtype::f32, x), {1, numel, numel});
      const auto levels = levels_on_the_wire(spec, wire.data(), numel);
      for (int64_t i = 0; i < numel; ++i) ASSERT_EQ(std::fabs(levels[i]), 91) << kernels->name << " " << i;
    }
}

TEST(Stochastic, ReduceEncodeDrawsTheNumbersOfRowMinusOne) {
  const Spec spec = stochastic(Kind::int8, 64, kKey);
  const int64_t numel = 509;
  const auto x = make_values(2 * numel, Temper::ordinary, 97);
  for (const Kernels* kernels : all_kernels()) {
    const Bytes wire = encode(*kernels, spec, Dtype::f32, as_bytes(Dtype::f32, x), {2, numel, 2 * numel});
    std::vector<float> sum(numel, 0.0f);
    kernels->decode_add(spec, wire.data(), 2, numel, numel, sum.data());
    for (float& value : sum) value *= 0.5f;
    Bytes out(codec::row_bytes(spec, numel), 0xab);
    kernels->reduce_encode(spec, wire.data(), 2, numel, numel, 0.5, out.data(), nullptr);
    EXPECT_EQ(levels_on_the_wire(spec, out.data(), numel), reference_int8(sum, 64, -1)) << kernels->name;
    EXPECT_NE(levels_on_the_wire(spec, out.data(), numel), reference_int8(sum, 64, 0)) << kernels->name;
  }
}

// The mean over many keys is x, within 5 standard deviations. The gap between two levels is known, and with it the variance
// of one result.
TEST(Stochastic, TheMeanOverKeysIsTheValueItself) {
  constexpr int kTrials = 4000;
  for (Kind kind : {Kind::int8, Kind::int4})
    for (Temper temper : sampled({Temper::ordinary, Temper::offset, Temper::tiny, Temper::huge})) {
      const auto x = make_values(96, temper, 101);
      std::vector<double> mean(96, 0.0);
      double gap = 0;
      for (int trial = 0; trial < kTrials; ++trial) {
        const Spec spec = stochastic(kind, 32, codec::make_key(7, trial, 0, 0));
        const auto y = round_trip(codec::kernels(), spec, x);
        for (size_t i = 0; i < 96; ++i) {
          mean[i] += y[i] / double{kTrials};
          gap = std::max(gap, std::fabs(double{y[i]} - x[i]));
        }
      }
      const double allowed = 5 * 0.5 * gap / std::sqrt(kTrials);
      for (size_t i = 0; i < 96; ++i)
        ASSERT_LE(std::fabs(mean[i] - x[i]), allowed + 3e-5 * gap)
            << static_cast<int>(kind) << " temper " << static_cast<int>(temper) << " element " << i;
    }
}

TEST(Stochastic, RoundingToNearestIsOffByMoreThanTheBoundOfThatMean) {
  for (Kind kind : {Kind::int8, Kind::int4}) {
    const auto x = make_values(96, Temper::ordinary, 101);
    const auto y = round_trip(codec::kernels(), stochastic(kind, 32, kKey), x);
    const auto nearest = round_trip(codec::kernels(), stochastic(kind, 32, 0), x);
    double gap = 0, largest = 0;
    for (size_t i = 0; i < 96; ++i) {
      gap = std::max(gap, std::fabs(double{y[i]} - x[i]));
      largest = std::max(largest, std::fabs(double{nearest[i]} - x[i]));
    }
    EXPECT_GT(largest, 5 * 0.5 * gap / std::sqrt(4000.0));
  }
}

TEST(Stochastic, GridValuesAndZerosAreExactForEveryKey) {
  for (const Kernels* kernels : all_kernels())
    for (uint64_t key = 1; key < 500; ++key) {
      std::vector<float> x(256);
      for (int i = 0; i < 256; ++i) x[i] = static_cast<float>(std::max(i, 1) - 128);
      ASSERT_EQ(round_trip(*kernels, stochastic(Kind::int8, 256, key), x), x)
          << kernels->name << " key " << key;
      for (int i = 0; i < 256; ++i) x[i] = static_cast<float>((i % 15 - 7) * (6 + std::abs(i % 15 - 7)));
      ASSERT_EQ(round_trip(*kernels, stochastic(Kind::int4, 256, key), x), x)
          << kernels->name << " key " << key;
    }
}

TEST(Stochastic, NonFiniteBlocksBecomeNaNAndZeroBlocksStayZero) {
  for (const Kernels* kernels : all_kernels())
    for (Kind kind : {Kind::int8, Kind::int4}) {
      std::vector<float> x(96, 0.0f);
      x[40] = kInf;
      const auto y = round_trip(*kernels, stochastic(kind, 32, kKey), x);
      for (int i = 0; i < 96; ++i) ASSERT_TRUE(i / 32 == 1 ? std::isnan(y[i]) : to_bits(y[i]) == 0);
    }
}

// Correlation and distribution of the numbers, seen in the codes: v = 0.5 rounds up if the fraction is above a half.
TEST(Stochastic, NumbersOfNeighboursRowsAndKeysAreUncorrelated) {
  const int64_t numel = 1 << 16;
  const auto signs = [&](uint64_t key, int64_t row) {
    std::vector<int> out;
    for (int64_t i = 0; i < numel; ++i) out.push_back(fraction(key, row, i) > 0.5 ? 1 : -1);
    return out;
  };
  const auto correlation = [&](const std::vector<int>& a, const std::vector<int>& b, int64_t lag) {
    double sum = 0;
    for (int64_t i = 0; i + lag < numel; ++i) sum += a[i] * b[i + lag];
    return std::fabs(sum) / std::sqrt(static_cast<double>(numel - lag));
  };
  const auto base = signs(kKey, 0);
  for (int64_t lag : {1, 2, 8, 15, 16, 17, 32, 64, 256}) EXPECT_LT(correlation(base, base, lag), 5) << lag;
  for (int64_t row : {-1, 1, 2, 1000}) EXPECT_LT(correlation(base, signs(kKey, row), 0), 5) << row;
  for (int bit = 0; bit < 64; ++bit)
    EXPECT_LT(correlation(base, signs(kKey ^ uint64_t{1} << bit, 0), 0), 5) << "key bit " << bit;
}

TEST(Stochastic, NumbersAreUniform) {
  std::vector<int> counts(256, 0);
  constexpr int kDraws = 1 << 18;
  for (int64_t i = 0; i < kDraws; ++i) ++counts[static_cast<int>(fraction(kKey, 3, i) * 256)];
  double chi_square = 0;
  for (int count : counts) chi_square += std::pow(count - kDraws / 256.0, 2) / (kDraws / 256.0);
  EXPECT_LT(chi_square, 255 + 5 * std::sqrt(2 * 255.0));
  EXPECT_GT(chi_square, 255 - 5 * std::sqrt(2 * 255.0));
}

TEST(Stochastic, KeysDifferInEveryPartAndAreNeverZero) {
  const uint64_t base = codec::make_key(0, 0, 0, 0);
  EXPECT_NE(base, 0u);
  EXPECT_EQ(base, codec::make_key(0, 0, 0, 0));
  EXPECT_NE(base, codec::make_key(1, 0, 0, 0));
  EXPECT_NE(base, codec::make_key(0, 1, 0, 0));
  EXPECT_NE(base, codec::make_key(0, 0, 1, 0));
  EXPECT_NE(base, codec::make_key(0, 0, 0, 1));
  EXPECT_NE(codec::make_key(0, 1, 0, 0), codec::make_key(0, 0, 1, 0));
}

}  // namespace
}  // namespace gossamer::test
