// The casts to bfloat16 and half, against a reference that rounds in float64.
#include "codec_support.h"

namespace gossamer::test {
namespace {

// Values around every kind of boundary: ties, denormals, overflow, and a stride through all bit patterns.
std::vector<float> hard_values() {
  std::vector<float> values = {0.0f,     -0.0f, 65503.9f,      65519.996f,    65520.0f, -65520.0f,
                               65536.0f, 1e38f, 3.4e38f,       kInf,          -kInf,    1e-40f,
                               -1e-45f,  6e-8f, 2.9802322e-8f, 2.9802326e-8f, 6.1e-5f};
  for (uint64_t bits = 0; bits < 0x100000000; bits += 65521 * 3)
    values.push_back(from_bits(static_cast<uint32_t>(bits)));
  for (uint32_t exponent = 1; exponent < 255; ++exponent)
    for (uint32_t tie : {0x0fffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0x18000u, 0x7fffffu})
      values.push_back(from_bits(exponent << 23 | tie));
  return values;
}

void expect_rounds_to_nearest(Kind kind, double (*reference)(double)) {
  const auto x = hard_values();
  for (const Kernels* kernels : all_kernels()) {
    const auto y = round_trip(*kernels, {kind, Dtype::f32, 1}, x);
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(y[i])) << kernels->name << " bits " << to_bits(x[i]);
      } else {
        ASSERT_EQ(to_bits(y[i]), to_bits(static_cast<float>(reference(x[i]))))
            << kernels->name << " value " << x[i] << " became " << y[i];
      }
    }
  }
}

TEST(CastBf16, RoundsToNearestEvenAndKeepsInfAndNaN) { expect_rounds_to_nearest(Kind::bf16, nearest_bfloat); }

TEST(CastFp16, RoundsToNearestEvenOverflowsToInfAndKeepsNaN) {
  expect_rounds_to_nearest(Kind::fp16, nearest_half);
}

TEST(CastFp16, EveryHalfDecodesToItsValue) {
  Bytes wire(2 * 65536);
  for (int64_t i = 0; i < 65536; ++i) reinterpret_cast<uint16_t*>(wire.data())[i] = static_cast<uint16_t>(i);
  for (const Kernels* kernels : all_kernels()) {
    const Bytes out = decode(*kernels, {Kind::fp16, Dtype::f32, 1}, wire, {1, 65536, 65536});
    for (int64_t i = 0; i < 65536; ++i) {
      const double expected = get(Dtype::f16, wire.data(), i), found = get(Dtype::f32, out.data(), i);
      ASSERT_TRUE(found == expected || (std::isnan(found) && std::isnan(expected)))
          << kernels->name << " half " << i;
    }
  }
}

TEST(Cast, ATensorAlreadyInTheWireTypeIsSentUnchanged) {
  for (const Kernels* kernels : all_kernels())
    for (Kind kind : {Kind::bf16, Kind::fp16}) {
      const Dtype dtype = kind == Kind::bf16 ? Dtype::bf16 : Dtype::f16;
      Bytes all(2 * 65536);
      for (int64_t i = 0; i < 65536; ++i)
        reinterpret_cast<uint16_t*>(all.data())[i] = static_cast<uint16_t>(i);
      const Bytes wire = encode(*kernels, {kind, dtype, 1}, dtype, all, {1, 65536, 65536});
      for (int64_t i = 0; i < 65536; ++i)
        ASSERT_TRUE(reinterpret_cast<const uint16_t*>(wire.data())[i] == i ||
                    std::isnan(get(dtype, all.data(), i)))
            << kernels->name << " bits " << i;
    }
}

TEST(Cast, RowsAreTwoBytesAnElementPaddedToSixteen) {
  for (Kind kind : {Kind::bf16, Kind::fp16})
    for (Dtype dtype : kDtypes) {
      EXPECT_EQ(codec::row_bytes({kind, dtype, 1}, 0), 0);
      EXPECT_EQ(codec::row_bytes({kind, dtype, 1}, 1), 16);
      EXPECT_EQ(codec::row_bytes({kind, dtype, 1}, 9), 32);
    }
}

}  // namespace
}  // namespace gossamer::test
