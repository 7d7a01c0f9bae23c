// The 1-bit codec against its definition: signs, the mean in its order of summation, isolation of Inf and NaN, the
// wire layout.
#include "base/check.h"
#include "codec_support.h"

namespace gossamer::test {
namespace {

Spec onebit(int64_t block, Dtype dtype = Dtype::f32) { return {Kind::onebit, dtype, block}; }

// docs/codecs.md, "OneBit": 128 partial sums by place, then halves added to halves.
double sum_in_order(const std::vector<float>& x, int64_t begin, int64_t end) {
  std::vector<double> partial(128, 0.0);
  for (int64_t i = begin; i < end; ++i) partial[(i - begin) % 128] += std::fabs(x[i]);
  for (int width = 64; width > 0; width /= 2)
    for (int p = 0; p < width; ++p) partial[p] += partial[p + width];
  return partial[0];
}

void expect_row_is_the_definition(const Kernels& kernels, const std::vector<float>& x, int64_t block,
                                  const std::string& where) {
  const auto numel = static_cast<int64_t>(x.size());
  const Bytes wire = encode(kernels, onebit(block), Dtype::f32, as_bytes(Dtype::f32, x), {1, numel, numel});
  const auto y = round_trip(kernels, onebit(block), x);
  const int64_t group = std::min(block, numel), header = (2 * ((numel + group - 1) / group) + 15) / 16 * 16;
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t begin = i / group * group, end = std::min(begin + group, numel);
    const auto mean = static_cast<float>(sum_in_order(x, begin, end) / static_cast<double>(end - begin));
    const double scale = get(Dtype::bf16, wire.data(), i / group);
    ASSERT_EQ(scale, nearest_bfloat(mean)) << where << " element " << i;
    ASSERT_EQ(wire[header + i / 8] >> i % 8 & 1, x[i] < 0 && scale != 0 ? 1 : 0) << where << " element " << i;
    ASSERT_EQ(y[i], static_cast<float>(x[i] < 0 ? -scale : scale)) << where << " element " << i;
  }
}

TEST(OneBit, CodesAreSignsAndScalesAreMeansByTheDefinition) {
  for (const Kernels* kernels : all_kernels())
    for (Temper temper :
         sampled({Temper::ordinary, Temper::offset, Temper::tiny, Temper::huge, Temper::denormal}))
      for (int64_t block : {128, 384, 4096})
        for (int64_t numel : {1, 31, 127, 128, 129, 255, 383, 384, 385, 509, 4099})
          expect_row_is_the_definition(*kernels, make_values(numel, temper, 13), block,
                                       describe(*kernels, onebit(block), {1, numel, numel}, temper));
}

TEST(OneBit, TheMeansBitsTellTheOrderOfSummation) {
  // Wide ranges make float64 sums depend on the order, so this test fixes the order.
  int differs = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    auto x = make_values(4096, Temper::ordinary, seed);
    for (float& value : x) value = std::exp(12 * value);
    double plain = 0;
    for (float value : x) plain += value;
    differs += plain != sum_in_order(x, 0, 4096);
  }
  EXPECT_GT(differs, 0) << "the test has lost its case";
}

TEST(OneBit, ZerosHaveTheSignPlusAndABlockOfZerosDecodesToZeros) {
  for (const Kernels* kernels : all_kernels()) {
    const auto zeros = make_values(300, Temper::zeros, 2);
    const Bytes wire = encode(*kernels, onebit(128), Dtype::f32, as_bytes(Dtype::f32, zeros), {1, 300, 300});
    EXPECT_EQ(wire, Bytes(wire.size(), 0)) << kernels->name;
    for (float value : round_trip(*kernels, onebit(128), zeros)) ASSERT_EQ(to_bits(value), 0u);
    auto x = zeros;
    x[3] = -128.0f;
    const auto y = round_trip(*kernels, onebit(128), x);
    for (int i = 0; i < 128; ++i) ASSERT_EQ(y[i], i == 3 ? -1.0f : 1.0f) << kernels->name;
  }
}

TEST(OneBit, AShortBlockAveragesItsOwnElementsOnly) {
  for (const Kernels* kernels : all_kernels()) {
    const std::vector<float> x(130, -4.0f);
    EXPECT_EQ(round_trip(*kernels, onebit(128), x), x) << kernels->name;
  }
}

TEST(OneBit, MagnitudesNextToTheLargestFloat32StayFinite) {
  for (const Kernels* kernels : all_kernels()) {
    const std::vector<float> x(4096, std::numeric_limits<float>::max());
    for (float value : round_trip(*kernels, onebit(4096), x)) ASSERT_EQ(value, 0x1.fep127f) << kernels->name;
  }
}

TEST(OneBit, ANonFiniteValueTurnsItsBlockIntoNaNAndTouchesNoOther) {
  expect_non_finite_values_stay_in_their_block(onebit(128), 200);
}

TEST(OneBit, RowsAreScalesThenBitsEachPaddedToSixteenBytes) {
  EXPECT_EQ(codec::row_bytes(onebit(128), 0), 0);
  EXPECT_EQ(codec::row_bytes(onebit(128), 1), 16 + 16);
  EXPECT_EQ(codec::row_bytes(onebit(128), 1024), 16 + 128);
  EXPECT_EQ(codec::row_bytes(onebit(128), 1025), 32 + 144);
  EXPECT_EQ(codec::row_bytes(onebit(128), 1 << 20), (1 << 14) + (1 << 17));
}

// The worked example of docs/codecs.md.
TEST(OneBit, TheExampleOfTheDocumentationHasItsBytes) {
  const std::vector<float> x = {-2.0f, -1.0f, 0.0f, 1.0f, 2.0f};
  Bytes expected(32, 0);
  expected[0] = 0x9a, expected[1] = 0x3f, expected[16] = 0x03;
  for (const Kernels* kernels : all_kernels())
    EXPECT_EQ(encode(*kernels, onebit(128), Dtype::f32, as_bytes(Dtype::f32, x), {1, 5, 5}), expected)
        << kernels->name;
}

TEST(OneBit, ABlockThatIsNoMultipleOf128IsRefused) {
  for (int64_t block : {-128, 0, 1, 32, 64, 200}) EXPECT_THROW(codec::row_bytes(onebit(block), 10), Error);
}

}  // namespace
}  // namespace gossamer::test
