// MinMaxUInt8 against the formula of Bagua's codec, written out here again, and the one departure from it.
#include "codec_support.h"

namespace gossamer::test {
namespace {

Spec minmax(Dtype dtype = Dtype::f32) { return {Kind::minmax_u8, dtype, 1}; }

// min, max, codes and decoded values of one finite, non-empty row, in float32 as in the formula.
struct Reference {
  float min, max;
  std::vector<uint8_t> codes;
  std::vector<float> decoded;
  bool needed_lower_clamp = false;

  explicit Reference(const std::vector<float>& x) : min(x[0]), max(x[0]) {
    for (float value : x) min = std::min(min, value), max = std::max(max, value);
    const float range = max - min;
    const float scale = 255.0f / (range + 1e-7f);
    const float upper = std::nearbyint(max * scale), lower = upper - 255.0f;
    for (float value : x) {
      const float level = std::min(std::nearbyint(value * scale), upper) - lower;
      needed_lower_clamp |= level < 0;
      codes.push_back(static_cast<uint8_t>(level < 0 ? 0 : level > 255 ? 255 : level));
      decoded.push_back((static_cast<float>(codes.back()) + lower) / scale);
    }
  }
};

void expect_row_equals(const Reference& reference, Dtype dtype, const uint8_t* row,
                       const std::string& where) {
  ASSERT_EQ(get(dtype, row, 0), reference.min) << where;
  ASSERT_EQ(get(dtype, row, 1), reference.max) << where;
  for (int64_t i = 2 * element_size(dtype); i < 32; ++i)
    ASSERT_EQ(row[i], 0) << where << " header byte " << i;
  for (size_t i = 0; i < reference.codes.size(); ++i)
    ASSERT_EQ(row[32 + i], reference.codes[i]) << where << " element " << i;
}

TEST(MinMaxU8, SlotsEqualTheFormulaByteForByte) {
  for (const Kernels* kernels : all_kernels())
    for (Dtype dtype : kDtypes)
      for (Temper temper :
           sampled({Temper::ordinary, Temper::offset, Temper::tiny, Temper::denormal, Temper::zeros}))
        for (int64_t numel : {1, 2, 31, 32, 33, 255, 257, 2053}) {
          const Bytes memory = as_bytes(dtype, make_values(numel, temper, 13));
          std::vector<float> x;
          for (double value : as_values(dtype, memory)) x.push_back(static_cast<float>(value));
          const Rows rows{1, numel, numel};
          const std::string where = describe(*kernels, minmax(dtype), rows, temper);
          const Bytes wire = encode(*kernels, minmax(dtype), dtype, memory, rows);
          const Reference reference(x);
          expect_row_equals(reference, dtype, wire.data(), where);
          const Bytes decoded = decode(*kernels, minmax(dtype), wire, rows);
          EXPECT_EQ(decoded, as_bytes(dtype, reference.decoded)) << where;
        }
}

TEST(MinMaxU8, CodesBelowZeroAreClampedInsteadOfWrapping) {
  bool seen = false;
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(100.0f, 100.01f);
    std::vector<float> x(512);
    for (float& value : x) value = uniform(random);
    const Reference reference(x);
    if (!reference.needed_lower_clamp) continue;
    seen = true;
    for (const Kernels* kernels : all_kernels()) {
      const auto y = round_trip(*kernels, minmax(), x);
      for (size_t i = 0; i < x.size(); ++i) ASSERT_LE(std::fabs(x[i] - y[i]), 2e-4f) << kernels->name;
    }
  }
  EXPECT_TRUE(seen) << "the test has lost its case";
}

TEST(MinMaxU8, ErrorIsAtMostHalfAStepAndTheRoundingOfFloat32) {
  for (const Kernels* kernels : all_kernels())
    for (int64_t numel : {1, 257, 4099}) {
      const auto x = make_values(numel, Temper::ordinary, 17);
      const Reference reference(x);
      const double half_step = (reference.max - reference.min + 1e-7) / 510;
      const auto y = round_trip(*kernels, minmax(), x);
      for (int64_t i = 0; i < numel; ++i)
        ASSERT_LE(std::fabs(x[i] - y[i]), half_step * (1 + 1e-4) + std::fabs(x[i]) * 0x1p-22)
            << kernels->name;
    }
}

TEST(MinMaxU8, ZerosAndConstantRowsComeBackExactly) {
  for (const Kernels* kernels : all_kernels()) {
    for (float constant : {0.0f, 3.7f, -123.456f}) {
      const std::vector<float> x(100, constant);
      EXPECT_EQ(round_trip(*kernels, minmax(), x), x) << kernels->name;
    }
    auto x = make_values(100, Temper::ordinary, 19);
    x[50] = 0;
    EXPECT_EQ(round_trip(*kernels, minmax(), x)[50], 0.0f);
  }
}

TEST(MinMaxU8, ANonFiniteValuePoisonsItsWholeRowAndNoOther) {
  for (const Kernels* kernels : all_kernels())
    for (Dtype dtype : kDtypes)
      for (float poison : {kNan, -kNan, kInf, -kInf}) {
        auto x = make_values(3 * 97, Temper::ordinary, 23);
        x[97 + 5] = poison;
        const Rows rows{3, 97, 3 * 97};
        const Bytes wire = encode(*kernels, minmax(dtype), dtype, as_bytes(dtype, x), rows);
        const auto y = as_values(dtype, decode(*kernels, minmax(dtype), wire, rows));
        for (int64_t i = 0; i < 3 * 97; ++i) ASSERT_EQ(std::isfinite(y[i]), i / 97 != 1) << kernels->name;
      }
}

TEST(MinMaxU8, AShortRowIgnoresWhatLiesBeyondItsEnd) {
  for (const Kernels* kernels : all_kernels()) {
    auto x = make_values(100, Temper::ordinary, 29);
    const Bytes wire = encode(*kernels, minmax(), Dtype::f32, as_bytes(Dtype::f32, x), {3, 40, 45});
    const int64_t stride = codec::row_bytes(minmax(), 40);
    ASSERT_EQ(stride, 32 + 64);
    const Reference last({x.begin() + 40, x.begin() + 45});
    expect_row_equals(last, Dtype::f32, wire.data() + stride, kernels->name);
    for (int64_t i = 32 + 5; i < stride; ++i) ASSERT_EQ(wire[stride + i], 0);
    for (int64_t i = 0; i < stride; ++i) ASSERT_EQ(wire[2 * stride + i], 0) << "empty row, byte " << i;
  }
}

TEST(MinMaxU8, AReducedRowIsRoundedToTheTensorTypeBeforeItsExtremesAreTaken) {
  for (const Kernels* kernels : all_kernels())
    for (Dtype dtype : {Dtype::f16, Dtype::bf16}) {
      const auto sums = make_values(300, Temper::ordinary, 31);
      const Rows rows{1, 300, 300};
      const Bytes from_sums = encode(*kernels, minmax(dtype), Dtype::f32, as_bytes(Dtype::f32, sums), rows);
      const Bytes rounded = encode(*kernels, minmax(dtype), dtype, as_bytes(dtype, sums), rows);
      EXPECT_EQ(from_sums, rounded) << kernels->name;
    }
}

}  // namespace
}  // namespace gossamer::test
