// The 2-bit codec against its definition: the nearest of four levels, the peaks of Int8, error bounds, isolation of Inf and
// NaN, the wire layout.
#include "base/check.h"
#include "codec_support.h"

namespace gossamer::test {
namespace {

Spec int2(int64_t block, Dtype dtype = Dtype::f32) { return {Kind::int2, dtype, block}; }

constexpr double kLevels[] = {-0.8125, -0.25, 0.25, 0.8125};

int level_number(const Bytes& wire, int64_t header, int64_t i) {
  return wire[header + i / 4] >> i % 4 * 2 & 3;
}

int64_t scales_end(int64_t numel, int64_t block) {
  const int64_t group = std::min(block, numel);
  return (2 * ((numel + group - 1) / group) + 15) / 16 * 16;
}

TEST(Int2, CodesAreTheNearestLevelsAndPeaksThoseOfInt8) {
  for (const Kernels* kernels : all_kernels())
    for (Temper temper :
         sampled({Temper::ordinary, Temper::offset, Temper::tiny, Temper::huge, Temper::denormal}))
      for (int64_t block : {32, 64, 4096})
        for (int64_t numel : {1, 31, 32, 33, 63, 64, 65, 257, 4099}) {
          const Rows rows{1, numel, numel};
          const auto x = make_values(numel, temper, 19);
          const Bytes memory = as_bytes(Dtype::f32, x);
          const Bytes wire = encode(*kernels, int2(block), Dtype::f32, memory, rows);
          const Bytes int8 = encode(*kernels, {Kind::int8, Dtype::f32, block}, Dtype::f32, memory, rows);
          const auto y = round_trip(*kernels, int2(block), x);
          const int64_t header = scales_end(numel, block);
          const std::string where = describe(*kernels, int2(block), rows, temper);
          for (int64_t i = 0; i < numel; ++i) {
            const double peak = get(Dtype::bf16, wire.data(), i / std::min(block, numel));
            ASSERT_EQ(peak, get(Dtype::bf16, int8.data(), i / std::min(block, numel))) << where;
            if (peak == 0) continue;
            double nearest = INFINITY;
            for (double level : kLevels) nearest = std::min(nearest, std::fabs(x[i] - level * peak));
            const double level = kLevels[level_number(wire, header, i)] * peak;
            ASSERT_LE(std::fabs(x[i] - level), nearest * (1 + 1e-6) + 0x1p-149) << where << " element " << i;
            ASSERT_EQ(y[i], static_cast<float>(level)) << where << " element " << i;
          }
        }
}

TEST(Int2, ErrorIsAtMostNineThirtySecondsOfTheLargestMagnitudeOfTheBlock) {
  for (const Kernels* kernels : all_kernels())
    for (unsigned seed = 0; seed < 50; ++seed) {
      const auto x = make_values(4096, Temper::ordinary, seed);
      const auto y = round_trip(*kernels, int2(64), x);
      for (size_t i = 0; i < x.size(); ++i) {
        const double absmax = absmax_of(x, i / 64 * 64, i / 64 * 64 + 64);
        ASSERT_LE(std::fabs(double{x[i]} - y[i]), absmax * (9.0 / 32 + 0x1p-8)) << kernels->name;
      }
    }
}

TEST(Int2, ZerosHaveTheSignPlusAndABlockOfZerosDecodesToZeros) {
  for (const Kernels* kernels : all_kernels()) {
    const auto zeros = make_values(300, Temper::zeros, 2);
    const Bytes wire = encode(*kernels, int2(64), Dtype::f32, as_bytes(Dtype::f32, zeros), {1, 300, 300});
    EXPECT_EQ(wire, Bytes(wire.size(), 0)) << kernels->name;
    for (float value : round_trip(*kernels, int2(64), zeros)) ASSERT_EQ(to_bits(value), 0u);
    auto x = zeros;
    x[3] = -128.0f, x[4] = -0.0f;
    const auto y = round_trip(*kernels, int2(64), x);
    for (int i = 0; i < 64; ++i) ASSERT_EQ(y[i], i == 3 ? -104.0f : 32.0f) << kernels->name;
  }
}

TEST(Int2, MagnitudesNextToTheLargestFloat32StayFinite) {
  for (const Kernels* kernels : all_kernels()) {
    const std::vector<float> x(4096, std::numeric_limits<float>::max());
    for (float value : round_trip(*kernels, int2(4096), x))
      ASSERT_EQ(value, 0.8125f * 0x1.fep127f) << kernels->name;
  }
}

TEST(Int2, ANonFiniteValueTurnsItsBlockIntoNaNAndTouchesNoOther) {
  expect_non_finite_values_stay_in_their_block(int2(64), 100);
}

TEST(Int2, RowsAreScalesThenCodesEachPaddedToSixteenBytes) {
  EXPECT_EQ(codec::row_bytes(int2(64), 0), 0);
  EXPECT_EQ(codec::row_bytes(int2(64), 1), 16 + 16);
  EXPECT_EQ(codec::row_bytes(int2(64), 512), 16 + 128);
  EXPECT_EQ(codec::row_bytes(int2(64), 513), 32 + 144);
  EXPECT_EQ(codec::row_bytes(int2(64), 1 << 20), (1 << 15) + (1 << 18));
}

// The worked example of docs/codecs.md.
TEST(Int2, TheExampleOfTheDocumentationHasItsBytes) {
  const std::vector<float> x = {-2.0f, -1.0f, 0.0f, 1.0f, 2.0f};
  Bytes expected(32, 0);
  expected[0] = 0x00, expected[1] = 0x40, expected[16] = 0xa4, expected[17] = 0x03;
  for (const Kernels* kernels : all_kernels())
    EXPECT_EQ(encode(*kernels, int2(64), Dtype::f32, as_bytes(Dtype::f32, x), {1, 5, 5}), expected)
        << kernels->name;
}

TEST(Int2, ABlockThatIsNoMultipleOf32IsRefused) {
  for (int64_t block : {-32, 0, 1, 31, 48, 100}) EXPECT_THROW(codec::row_bytes(int2(block), 10), Error);
}

}  // namespace
}  // namespace gossamer::test
