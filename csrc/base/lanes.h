// Lane types: `width` floats that an arithmetic header handles as one value. Scalar is one float, on the host and on a
// CUDA thread; Avx2 and Avx512 hold 32, Neon holds 16. All have one interface and give equal bits: nothing here contracts,
// reorders or approximates. Not a maths library: it holds what the codecs need. Included by codec/*.h, flat/ and codec/'s drivers.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace gossamer::GOSSAMER_ISA {

// 16-bit elements as they lie in memory.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNanBits = 0x7fc00000;     // the one NaN that reaches the wire
constexpr uint32_t kOneAndHalf = 0x3f800040;  // 1 + 2^-17, which is half a step of drawn() above 1

template <class To, class From>
HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Round to nearest even; `x` is not a NaN other than kNanBits.
HD uint16_t half_from_float(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return x == x ? bits : uint16_t{0x7e00};
#else
  const uint32_t sign = bit_cast<uint32_t>(x) & 0x80000000u;
  uint32_t bits = bit_cast<uint32_t>(x) ^ sign;
  if (bits >= (143u << 23)) {  // 2^16 and above, Inf, NaN
    bits = bits > kInfinityBits ? 0x7e00 : 0x7c00;
  } else if (bits < (113u << 23)) {  // a half denormal: let the float adder round it into place
    constexpr uint32_t magic = 126u << 23;
    bits = bit_cast<uint32_t>(bit_cast<float>(bits) + bit_cast<float>(magic)) - magic;
  } else {
    bits = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  }
  return static_cast<uint16_t>(bits | sign >> 16);
#endif
}

HD float float_from_half(uint16_t half) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
#else
  constexpr uint32_t exponent = 0x7c00u << 13;
  uint32_t bits = (half & 0x7fffu) << 13;
  const uint32_t found = bits & exponent;
  bits += 112u << 23;
  if (found == exponent) {
    bits += 112u << 23;
  } else if (found == 0) {
    bits = bit_cast<uint32_t>(bit_cast<float>(bits + (1u << 23)) - bit_cast<float>(113u << 23));
  }
  return bit_cast<float>(bits | (half & 0x8000u) << 16);
#endif
}

// Round to nearest even; NaN must be kNanBits, whose low half is zero.
HD uint32_t bfloat_from_bits(uint32_t bits) { return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; }

// Four of the eight bytes of x and then y: byte i is the one whose number is digit i of the hexadecimal `numbers`, 0 to 7.
HD uint32_t permuted(uint32_t x, uint32_t y, uint32_t numbers) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(x, y, numbers);
#else
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t number = numbers >> 4 * i & 7;
    bytes |= ((number < 4 ? x : y) >> 8 * (number % 4) & 0xff) << 8 * i;
  }
  return bytes;
#endif
}

// A bijection of 32 bits (the lowbias32 of Chris Wellons' hash prospector), for numbers that differ by position.
constexpr uint32_t kScramble1 = 0x7feb352d, kScramble2 = 0x846ca68b;
HD uint32_t scramble(uint32_t x) {
  x = (x ^ (x >> 16)) * kScramble1;
  x = (x ^ (x >> 15)) * kScramble2;
  return x ^ (x >> 16);
}

// A double in float lanes is rounded to float first: +-1e39 becomes Inf.
struct Scalar {
  static constexpr int width = 1;
  static constexpr bool kLooksUp = false;  // whether the lane has floats_of_half() and its kin
  using F = float;
  using I = int32_t;
  using Bytes = int32_t;  // a byte an element, in vectors
  using Tail = Scalar;    // takes the elements that do not fill a lane

  static HD F load(const float* p) { return *p; }
  static HD F load(const double* p) { return static_cast<float>(*p); }
  static HD F load(const Half* p) { return float_from_half(p->bits); }
  static HD F load(const Bfloat* p) { return bit_cast<float>(uint32_t{p->bits} << 16); }
  static HD I load(const int8_t* p) { return *p; }
  static HD I load(const uint8_t* p) { return *p; }
  // Code i of codes packed in `bits` bits each, lowest first. `i` is a multiple of the lane's width.
  template <int bits>
  static HD I load_packed(const uint8_t* codes, int64_t i) {
    return codes[i * bits / 8] >> (i * bits % 8) & ((1 << bits) - 1);
  }

  static HD void store(float* p, F x) { *p = x; }
  static HD void store(double* p, F x) { *p = x; }
  static HD void store(Half* p, F x) { p->bits = half_from_float(quiet(x)); }
  static HD void store(Bfloat* p, F x) {
    p->bits = static_cast<uint16_t>(bfloat_from_bits(bit_cast<uint32_t>(quiet(x))));
  }
  static HD void store(int8_t* p, I x) { *p = static_cast<int8_t>(x); }
  static HD void store(uint8_t* p, I x) { *p = static_cast<uint8_t>(x); }
  // Codes are stored in order: the first code of a byte clears the rest of the byte.
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, I x) {
    uint8_t& byte = codes[i * bits / 8];
    const int64_t shift = i * bits % 8;
    byte = static_cast<uint8_t>((shift == 0 ? 0 : byte) | x << shift);
  }
  static HD void add_to(float* p, F x) { *p = *p + x; }
  static HD void add_to(double* p, F x) { *p = *p + static_cast<double>(x); }

  // The value that `store` would leave in memory of the tag's type.
  static HD F rounded(F x, float) { return x; }
  static HD F rounded(F x, double) { return x; }
  static HD F rounded(F x, Half) { return float_from_half(half_from_float(quiet(x))); }
  static HD F rounded(F x, Bfloat) {
    return bit_cast<float>(bfloat_from_bits(bit_cast<uint32_t>(quiet(x))) << 16);
  }

  static HD F add(F x, float y) { return x + y; }
  static HD F sub(F x, float y) { return x - y; }
  static HD F mul(F x, float y) { return x * y; }
  static HD F div(F x, float y) { return x / y; }
  static HD F min(F x, float y) { return x < y ? x : y; }  // y where either is NaN, as minps does
  static HD F max(F x, float y) { return x > y ? x : y; }
  static HD F quiet(F x) { return x == x ? x : bit_cast<float>(kNanBits); }
  static HD F less(F x, float y) { return x < y ? 1.0f : 0.0f; }
  static HD I is_negative(F x) { return x < 0.0f ? 1 : 0; }
  static HD F magnitude_of(F x) { return bit_cast<float>(magnitude(x)); }
  static HD F with_sign(F x, F sign) {
    return bit_cast<float>(magnitude(x) | (bit_cast<int32_t>(sign) & INT32_MIN));
  }
  static HD F sqrt(F x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
  }
  // The root of a normal x > 0, but for 2^-20 of it. Not the same on each device.
  static HD F near_sqrt(F x) {
#if defined(__CUDA_ARCH__)
    F root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#else
    return sqrt(x);
#endif
  }
  // x y + z where x y is exact, so that it does not matter whether it is rounded.
  static HD F exact_mul_add(F x, F y, F z) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(x, y, z);
#else
    return x * y + z;
#endif
  }
  static HD F floor(F x) {  // |x| < 2^31; by hand for rint's reason
    const float whole = static_cast<float>(static_cast<int32_t>(x));
    return whole > x ? whole - 1.0f : whole;
  }

  static HD F rint(F x) {
#if defined(__CUDA_ARCH__)
    return rintf(x);
#else  // by hand: rintf is a library call without SSE4.1
    const uint32_t sign = bit_cast<uint32_t>(x) & 0x80000000u;
    const float magnitude = bit_cast<float>(bit_cast<uint32_t>(x) ^ sign);
    const float whole = (magnitude + 8388608.0f) - 8388608.0f;
    return magnitude < 8388608.0f ? bit_cast<float>(bit_cast<uint32_t>(whole) | sign) : x;
#endif
  }

  // Round half to even; |x| < 2^22.
  static HD I to_int(F x) { return bit_cast<int32_t>(x + 12582912.0f) - bit_cast<int32_t>(12582912.0f); }
  static HD F to_float(I x) { return static_cast<float>(x); }

  // The sum in float64 of 128 numbers: i takes i + 64, for i < 64, then i + 32, for i < 32, and so on. The result is number 0.
  template <class T>
  static HD double sum_in_order(const T* p) {
    double sums[64];
    for (int i = 0; i < 64; ++i) sums[i] = static_cast<double>(p[i]) + static_cast<double>(p[i + 64]);
    for (int width = 32; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    return sums[0];
  }

  static HD I set(int32_t x) { return x; }
  static HD I min_int(I x, I y) { return x < y ? x : y; }
  static HD I max_int(I x, I y) { return x > y ? x : y; }
  static HD int32_t reduce_min(I x) { return x; }
  static HD int32_t reduce_max(I x) { return x; }

  // The bits of x, rotated left by one and combined with `turn` by exclusive or.
  static HD I rotated(F x, int32_t turn) {
    const auto bits = bit_cast<uint32_t>(x);
    return static_cast<I>(bits << 1 | bits >> 31) ^ turn;
  }

  // The bits of |x|. They are ordered as |x| is, with Inf and then NaN on top.
  static HD I magnitude(F x) { return bit_cast<int32_t>(x) & 0x7fffffff; }
  // An integer ordered as x is: -NaN, -Inf, ..., -0, +0, ..., Inf, NaN. Its own inverse.
  static HD I ordered(F x) { return bit_cast<int32_t>(x) ^ ((bit_cast<int32_t>(x) >> 31) & 0x7fffffff); }

  // Random numbers 1 + (n + 1/2) / 2^16, n = 0 ... 65535, for elements i, i + 1, ... of the stream with the key
  // (first, second). One word of 32 bits serves elements 16 apart: 32 words, 64 elements, and so on.
  static HD F drawn(uint32_t first, uint32_t second, int64_t i) {
    const auto index = static_cast<uint32_t>(i / 32 * 16 + i % 16);
    const uint32_t word = scramble(scramble(index + first) ^ second);
    const uint32_t half = i / 16 % 2 == 0 ? word & 0xffff : word >> 16;
    return bit_cast<float>(half << 7 | kOneAndHalf);
  }
};

// Values that must stay float64 (the identity codec on double tensors).
struct Double {
  static constexpr int width = 1;
  using F = double;
  using Tail = Double;

  static HD F load(const double* p) { return *p; }
  static HD void store(double* p, F x) { *p = x; }
  static HD void add_to(double* p, F x) { *p = *p + x; }
  static HD F mul(F x, double y) { return x * y; }
  static HD F quiet(F x) { return x == x ? x : bit_cast<double>(uint64_t{0x7ff8000000000000}); }
};

}  // namespace gossamer::GOSSAMER_ISA

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "base/lanes_avx512.h"
#elif defined(__AVX2__) && defined(__F16C__)
#include "base/lanes_avx2.h"
#elif defined(GOSSAMER_NEON) && defined(__aarch64__)
#include "base/lanes_neon.h"
#endif
