// The int8 codec: error bounds over the whole range of float32, isolation of Inf and NaN, the wire layout.
#include "base/check.h"
#include "codec_support.h"

namespace gossamer::test {
namespace {

Spec int8(int64_t block, Dtype dtype = Dtype::f32) { return {Kind::int8, dtype, block}; }

// The block header's value for a largest magnitude that is a normal number.
double peak_of(float absmax) { return std::min(nearest_bfloat(absmax), 0x1.fep127); }

TEST(Int8, ErrorIsAtMostHalfAStepOfTheBlock) {
  for (const Kernels* kernels : all_kernels())
    for (int64_t block : {32, 96, 256, 4096})
      for (int64_t numel : {1, 31, 32, 255, 256, 257, 4099}) {
        const auto x = make_values(numel, Temper::ordinary, 7);
        const auto y = round_trip(*kernels, int8(block), x);
        for (int64_t start = 0; start < numel; start += block) {
          const int64_t end = std::min(start + block, numel);
          float absmax = 0;
          for (int64_t i = start; i < end; ++i) absmax = std::max(absmax, std::fabs(x[i]));
          for (int64_t i = start; i < end; ++i)
            ASSERT_LE(std::fabs(double{x[i]} - y[i]), peak_of(absmax) / 254 * (1 + 1e-5))
                << kernels->name << " block " << block << " numel " << numel << " element " << i;
        }
      }
}

TEST(Int8, RelativeErrorIsTheSameForTinyOrdinaryAndHugeGradients) {
  for (const Kernels* kernels : all_kernels())
    for (double magnitude : {1e-37, 1e-35, 1e-31, 7.8e-31, 8e-31, 1e-20, 1.0, 1e20, 1e35, 1.5e38, 3.4e38}) {
      std::vector<float> x = make_values(512, Temper::ordinary, 3);
      for (float& value : x) value = static_cast<float>(std::tanh(value) * magnitude);
      const auto y = round_trip(*kernels, int8(256), x);
      double error = 0, norm = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        error += std::pow((double{x[i]} - y[i]) / magnitude, 2);
        norm += std::pow(x[i] / magnitude, 2);
      }
      EXPECT_LT(std::sqrt(error / norm), 0.008) << kernels->name << " magnitude " << magnitude;
    }
}

TEST(Int8, DenormalsSurviveWithinHalfAStepOfTheirPeakWhichIsRoundedUp) {
  const double unit = std::ldexp(1.0, -133);  // the spacing of denormal bfloat16 numbers
  for (const Kernels* kernels : all_kernels())
    for (uint32_t top : {1u, 63u, 64u, 1000u, 100000u, 0x7fffffu}) {
      std::vector<float> x(256);
      for (uint32_t i = 0; i < 256; ++i) x[i] = from_bits((top / 256) * i + (i == 255 ? top % 256 : 0));
      x[255] = from_bits(top);
      const auto y = round_trip(*kernels, int8(256), x);
      for (size_t i = 0; i < x.size(); ++i)
        ASSERT_LE(std::fabs(double{x[i]} - y[i]), std::ceil(x[255] / unit) * unit / 254 * (1 + 1e-2))
            << kernels->name << " top " << top << " element " << i;
    }
}

TEST(Int8, ANonFiniteValueTurnsItsBlockIntoNaNAndTouchesNoOther) {
  expect_non_finite_values_stay_in_their_block(int8(256), 300);
}

TEST(Int8, ADoubleBeyondFloat32PoisonsItsBlock) {
  for (const Kernels* kernels : all_kernels()) {
    std::vector<double> x(64, 1.0);
    x[40] = 1e39;
    const Rows rows{1, 64, 64};
    const Spec spec = int8(32, Dtype::f64);
    const Bytes wire = encode(*kernels, spec, Dtype::f64, as_bytes(Dtype::f64, x), rows);
    const auto y = as_values(Dtype::f64, decode(*kernels, spec, wire, rows));
    EXPECT_NEAR(y[0], 1.0, 1e-6);
    EXPECT_TRUE(std::isnan(y[32]) && std::isnan(y[63]));
  }
}

TEST(Int8, CodesAreTheDefinitionInExactArithmetic) {
  const auto x = make_values(2048, Temper::ordinary, 5);
  const Rows rows{1, 2048, 2048};
  for (const Kernels* kernels : all_kernels()) {
    const Bytes wire = encode(*kernels, int8(256), Dtype::f32, as_bytes(Dtype::f32, x), rows);
    const auto* codes = reinterpret_cast<const int8_t*>(wire.data() + 16);
    for (int b = 0; b < 8; ++b) {
      float absmax = 0;
      for (int i = 0; i < 256; ++i) absmax = std::max(absmax, std::fabs(x[b * 256 + i]));
      const double peak = peak_of(absmax);
      ASSERT_EQ(get(Dtype::bf16, wire.data(), b), peak);
      for (int i = 0; i < 256; ++i) {
        const double level = x[b * 256 + i] * (127.0 / peak);
        ASSERT_LE(std::fabs(level - codes[b * 256 + i]), 0.5 + 1e-4) << kernels->name;
      }
    }
  }
}

TEST(Int8, RowsArePeaksThenCodesEachPaddedToSixteenBytes) {
  EXPECT_EQ(codec::row_bytes(int8(256), 0), 0);
  EXPECT_EQ(codec::row_bytes(int8(256), 1), 16 + 16);
  EXPECT_EQ(codec::row_bytes(int8(256), 1024), 16 + 1024);
  EXPECT_EQ(codec::row_bytes(int8(64), 1025), 48 + 1040);
  EXPECT_EQ(codec::row_bytes(int8(32), 4099), 272 + 4112);
}

// The magnitudes whose rounding to bfloat16 reduces them most.
TEST(Int8, NoCodeLiesBeyond127AndTheLargestMagnitudeHasIt) {
  for (const Kernels* kernels : all_kernels())
    for (float base :
         {1.0f, 1.00390625f, 1.0078125f, 1.5f, 1.99609375f, 0x1.0p-126f, 0x1.0p-100f, 0x1.fep127f})
      for (int step = -2; step <= 2; ++step) {
        std::vector<float> x(64, 0.0f);
        x[5] = std::min(from_bits(to_bits(base) + step), std::numeric_limits<float>::max());
        x[6] = -x[5];
        const Bytes wire = encode(*kernels, int8(64), Dtype::f32, as_bytes(Dtype::f32, x), {1, 64, 64});
        const auto* codes = reinterpret_cast<const int8_t*>(wire.data() + 16);
        EXPECT_EQ(codes[5], 127) << kernels->name << " base " << base << " step " << step;
        EXPECT_EQ(codes[6], -127) << kernels->name << " base " << base << " step " << step;
        EXPECT_TRUE(std::isfinite(round_trip(*kernels, int8(64), x)[5]));
      }
}

TEST(Int8, ABlockThatIsNoMultipleOf32IsRefused) {
  for (int64_t block : {-32, 0, 1, 16, 33, 100}) EXPECT_THROW(codec::row_bytes(int8(block), 10), Error);
  try {
    codec::row_bytes(int8(100), 10);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind, ErrorKind::codec);
    EXPECT_NE(std::string(error.what()).find("got 100"), std::string::npos);
  }
}

TEST(Int8, ZerosStayZeroAndSoDoTheirPeaks) {
  for (const Kernels* kernels : all_kernels()) {
    const auto x = as_bytes(Dtype::f32, make_values(300, Temper::zeros, 2));
    const Bytes wire = encode(*kernels, int8(256), Dtype::f32, x, {1, 300, 300});
    EXPECT_EQ(wire, Bytes(wire.size(), 0)) << kernels->name;
  }
}

}  // namespace
}  // namespace gossamer::test
