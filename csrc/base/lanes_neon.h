// The NEON lane, for 64-bit ARM: 16 floats in four registers. Included by lanes.h for the files that ask for it; the
// interface is Scalar's. It takes the operations on whole lanes from lanes_vector.inl, as the AVX lanes do. So the functions
// here have the names of Intel's intrinsics. Every 64-bit ARM processor has NEON, with conversions of float16.
#pragma once

#include <arm_neon.h>

#include "base/lanes_steps.h"

#define GOSSAMER_MM(op) neon_##op
#define GOSSAMER_MM_SI(op) neon_##op

namespace gossamer::GOSSAMER_ISA {

// Operators work on ARM's types because GCC and Clang define those as vectors.
HD float32x4_t neon_set1_ps(float x) { return vdupq_n_f32(x); }
HD float64x2_t neon_set1_pd(double x) { return vdupq_n_f64(x); }
HD int32x4_t neon_set1_epi32(uint32_t x) { return vreinterpretq_s32_u32(vdupq_n_u32(x)); }

template <class Register>
HD Register neon_load(const void* p) {  // from any byte
  Register x;
  memcpy(&x, p, sizeof(x));
  return x;
}
HD float32x4_t neon_loadu_ps(const float* p) { return neon_load<float32x4_t>(p); }
HD float64x2_t neon_loadu_pd(const double* p) { return neon_load<float64x2_t>(p); }
HD void neon_storeu_ps(float* p, float32x4_t x) { memcpy(p, &x, sizeof(x)); }
HD void neon_storeu_pd(double* p, float64x2_t x) { memcpy(p, &x, sizeof(x)); }

HD float32x4_t neon_add_ps(float32x4_t x, float32x4_t y) { return x + y; }
HD float32x4_t neon_sub_ps(float32x4_t x, float32x4_t y) { return x - y; }
HD float32x4_t neon_mul_ps(float32x4_t x, float32x4_t y) { return x * y; }
HD float32x4_t neon_div_ps(float32x4_t x, float32x4_t y) { return x / y; }
HD float64x2_t neon_add_pd(float64x2_t x, float64x2_t y) { return x + y; }
HD float32x4_t neon_sqrt_ps(float32x4_t x) { return vsqrtq_f32(x); }
HD float64x2_t neon_sqrt_pd(float64x2_t x) { return vsqrtq_f64(x); }
HD float32x4_t neon_fmadd_ps(float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(z, x, y); }
HD float64x2_t neon_fmadd_pd(float64x2_t x, float64x2_t y, float64x2_t z) { return vfmaq_f64(z, x, y); }
// vminq_f32 gives NaN where either is NaN, and minps gives y.
HD float32x4_t neon_min_ps(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
HD float32x4_t neon_max_ps(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }

HD int32x4_t neon_add_epi32(int32x4_t x, int32x4_t y) { return vaddq_s32(x, y); }
HD int32x4_t neon_mullo_epi32(int32x4_t x, int32x4_t y) { return vmulq_s32(x, y); }
HD int32x4_t neon_min_epi32(int32x4_t x, int32x4_t y) { return vminq_s32(x, y); }
HD int32x4_t neon_max_epi32(int32x4_t x, int32x4_t y) { return vmaxq_s32(x, y); }
HD int32x4_t neon_and_si(int32x4_t x, int32x4_t y) { return x & y; }
HD int32x4_t neon_or_si(int32x4_t x, int32x4_t y) { return x | y; }
HD int32x4_t neon_xor_si(int32x4_t x, int32x4_t y) { return x ^ y; }
HD int32x4_t neon_slli_epi32(int32x4_t x, int bits) { return x << bits; }
HD int32x4_t neon_srai_epi32(int32x4_t x, int bits) { return x >> bits; }
HD int32x4_t neon_srli_epi32(int32x4_t x, int bits) {
  return vreinterpretq_s32_u32(vreinterpretq_u32_s32(x) >> bits);
}
HD float32x4_t neon_and_ps(float32x4_t x, float32x4_t y) {
  return vreinterpretq_f32_s32(vreinterpretq_s32_f32(x) & vreinterpretq_s32_f32(y));
}
HD float32x4_t neon_or_ps(float32x4_t x, float32x4_t y) {
  return vreinterpretq_f32_s32(vreinterpretq_s32_f32(x) | vreinterpretq_s32_f32(y));
}

HD int32x4_t neon_cvtps_epi32(float32x4_t x) { return vcvtnq_s32_f32(x); }
HD float32x4_t neon_cvtepi32_ps(int32x4_t x) { return vcvtq_f32_s32(x); }
HD float32x4_t neon_cvtph_ps(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
HD int32x4_t neon_cvtepu16_epi32(uint16x4_t x) { return vreinterpretq_s32_u32(vmovl_u16(x)); }
HD int32x4_t neon_cvtepu8_epi32(uint8x8_t x) { return neon_cvtepu16_epi32(vget_low_u16(vmovl_u8(x))); }
HD int32x4_t neon_cvtepi8_epi32(uint8x8_t x) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(x))));
}

struct Neon {
  static constexpr int width = 16;
  static constexpr bool kLooksUp = false;
  using Floats = float32x4_t;
  using Ints = int32x4_t;
  using Doubles = float64x2_t;
  using Bits16 = uint16x4_t;
  using Bytes = int8x16_t;

#include "base/lanes_four.inl"
#include "base/lanes_vector.inl"

  template <int bits>
  static HD I load_packed(const uint8_t* codes, int64_t i) {
    static_assert(bits == 4 || bits == 2 || bits == 1, "codes are packed in 4 bits, 2 bits or 1 bit");
    if constexpr (bits == 4) {
      const auto bytes = neon_load<uint8x8_t>(codes + i / 2);
      const uint8x8_t low = bytes & 15, high = bytes >> 4;
      const uint16x8_t first = vmovl_u8(vzip1_u8(low, high)), last = vmovl_u8(vzip2_u8(low, high));
      return {neon_cvtepu16_epi32(vget_low_u16(first)), neon_cvtepu16_epi32(vget_high_u16(first)),
              neon_cvtepu16_epi32(vget_low_u16(last)), neon_cvtepu16_epi32(vget_high_u16(last))};
    } else if constexpr (bits == 2) {
      const uint8_t* p = codes + i / 4;
      return {codes_of<2>(p[0]), codes_of<2>(p[1]), codes_of<2>(p[2]), codes_of<2>(p[3])};
    } else {
      const uint8_t* p = codes + i / 8;
      return {codes_of<1>(p[0]), codes_of<1>(p[0] >> 4), codes_of<1>(p[1]), codes_of<1>(p[1] >> 4)};
    }
  }

  static HD void store(int8_t* p, I x) { store_bytes(p, x); }
  static HD void store(uint8_t* p, I x) { store_bytes(p, x); }
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, Bytes x) {
    static_assert(bits == 4, "bytes are packed in 4 bits");
    const auto bytes = vreinterpretq_u8_s8(x);
    const uint8x8_t low = vget_low_u8(vuzp1q_u8(bytes, bytes)), high = vget_low_u8(vuzp2q_u8(bytes, bytes));
    const uint8x8_t pairs = low | high << 4;
    memcpy(codes + i / 2, &pairs, sizeof(pairs));
  }
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, I x) {
    static_assert(bits == 4 || bits == 2 || bits == 1, "codes are packed in 4 bits, 2 bits or 1 bit");
    if constexpr (bits == 4) {
      store_packed<4>(codes, i, vreinterpretq_s8_u8(low_bytes(x)));
    } else if constexpr (bits == 2) {
      uint8_t* p = codes + i / 4;
      p[0] = packed<2>(x.a), p[1] = packed<2>(x.b), p[2] = packed<2>(x.c), p[3] = packed<2>(x.d);
    } else {
      uint8_t* p = codes + i / 8;
      p[0] = packed<1>(x.a | x.b << 4), p[1] = packed<1>(x.c | x.d << 4);
    }
  }

  template <int first, int last, int... steps>
  static HD Bytes by_steps(I x) {
    const int16x8_t low = vqmovn_high_s32(vqmovn_s32(x.a), x.b), high = vqmovn_high_s32(vqmovn_s32(x.c), x.d);
    const int8x16_t bytes = vqmovn_high_s16(vqmovn_s16(low), high), distance = vqabsq_s8(bytes);
    static constexpr StepTables<steps...> tables;
    const uint8x16_t part = vreinterpretq_u8_s8(distance) >> 3;
    const auto table = [](const int8_t* p) { return neon_load<int8x16_t>(p); };
    const uint8x16_t reached = vcgtq_s8(distance, vqtbl1q_s8(table(tables.below), part));
    int8x16_t count = vqtbl1q_s8(table(tables.before), part) - vreinterpretq_s8_u8(reached);
    count = vbslq_s8(vcltzq_s8(bytes), vnegq_s8(count), count);
    return vminq_s8(count + vdupq_n_s8(first), vdupq_n_s8(last));
  }

  static HD I set(int32_t value) {
    const int32x4_t x = vdupq_n_s32(value);
    return {x, x, x, x};
  }
  static HD int32_t reduce_min(I x) {
    return vminvq_s32(vminq_s32(vminq_s32(x.a, x.b), vminq_s32(x.c, x.d)));
  }
  static HD int32_t reduce_max(I x) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d)));
  }

  static HD F drawn(uint32_t first, uint32_t second, int64_t i) {
    const int32x4_t places = {0, 1, 2, 3};
    const int32x4_t index = neon_set1_epi32(static_cast<uint32_t>(i / 32 * 16) + first);
    const int32x4_t key = neon_set1_epi32(second);
    const int32x4_t shift = vdupq_n_s32(i / 16 % 2 == 0 ? 7 : -9);  // which half of the words
    const auto part = [&](int32_t at) {
      const int32x4_t place = neon_add_epi32(index, vaddq_s32(places, vdupq_n_s32(at)));
      const int32x4_t words = scramble(scramble(place) ^ key);
      return one_and_fraction(vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(words), shift)));
    };
    return {part(0), part(4), part(8), part(12)};
  }

  static HD Floats as_floats(Ints x) { return vreinterpretq_f32_s32(x); }
  static HD Ints as_ints(Floats x) { return vreinterpretq_s32_f32(x); }
  static HD Bits16 load_bits16(const void* p) { return neon_load<uint16x4_t>(p); }
  static HD uint8x8_t load_bits8(const void* p) { return vcreate_u8(neon_load<uint32_t>(p)); }
  static HD void store_bits16(void* p, Bits16 x) { memcpy(p, &x, sizeof(x)); }
  static HD Bits16 narrowed(Ints x) { return vmovn_u32(vreinterpretq_u32_s32(x)); }
  static HD uint8x16_t low_bytes(I x) {
    const uint16x8_t low = vcombine_u16(narrowed(x.a), narrowed(x.b));
    const uint16x8_t high = vcombine_u16(narrowed(x.c), narrowed(x.d));
    return vcombine_u8(vmovn_u16(low), vmovn_u16(high));
  }
  static HD void store_bytes(void* p, I x) {
    const uint8x16_t bytes = low_bytes(x);
    memcpy(p, &bytes, sizeof(bytes));
  }
  template <int bits>
  static HD Ints codes_of(int32_t word) {  // the lowest four
    const int32x4_t places = {0, bits, 2 * bits, 3 * bits};
    return (vdupq_n_s32(word) >> places) & vdupq_n_s32((1 << bits) - 1);
  }
  template <int bits>
  static HD uint8_t packed(Ints codes) {
    const int32x4_t places = {0, bits, 2 * bits, 3 * bits};
    return static_cast<uint8_t>(vaddvq_s32(codes << places));
  }

  static HD Doubles load_wide(const float* p) { return vcvt_f64_f32(vld1_f32(p)); }
  static HD Floats load_register(const double* p) {
    return vcombine_f32(vcvt_f32_f64(neon_loadu_pd(p)), vcvt_f32_f64(neon_loadu_pd(p + 2)));
  }
  static HD Doubles low(Floats x) { return vcvt_f64_f32(vget_low_f32(x)); }
  static HD Doubles high(Floats x) { return vcvt_high_f64_f32(x); }
  static HD Floats quiet(Floats x) {
    return vbslq_f32(vceqq_f32(x, x), x, as_floats(neon_set1_epi32(kNanBits)));
  }
  static HD Bits16 to_half(Floats x) { return vreinterpret_u16_f16(vcvt_f16_f32(quiet(x))); }
  static HD Floats rint(Floats x) { return vrndnq_f32(x); }
  static HD Floats floor(Floats x) { return vrndmq_f32(x); }
  static HD Floats less(Floats x, Floats y) {
    return neon_and_ps(vreinterpretq_f32_u32(vcltq_f32(x, y)), vdupq_n_f32(1.0f));
  }
  static HD Ints is_negative(Floats x) { return vreinterpretq_s32_u32(vcltzq_f32(x) >> 31); }
};
using WidestLane = Neon;

#undef GOSSAMER_EACH
#undef GOSSAMER_EACH_WITH
#undef GOSSAMER_EACH_PAIR
#undef GOSSAMER_EACH_TRIPLE
#undef GOSSAMER_EACH_LOAD
#undef GOSSAMER_EACH_STORE

}  // namespace gossamer::GOSSAMER_ISA
