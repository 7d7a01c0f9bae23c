// The AVX-512 lane (F, BW, DQ, VL): 32 floats in two registers, the width of the AVX2 lane.
// Included by lanes.h where the compile flags allow it; the interface is Scalar's.
#pragma once

#include <immintrin.h>

#include "base/lanes_avx_bytes.h"

#define GOSSAMER_MM(op) _mm512_##op
#define GOSSAMER_MM_SI(op) _mm512_##op##512

namespace gossamer::GOSSAMER_ISA {

#define GOSSAMER_EACH(op) {op(x.a), op(x.b)}
#define GOSSAMER_EACH_WITH(op, y) {op(x.a, y), op(x.b, y)}
#define GOSSAMER_EACH_PAIR(op) {op(x.a, y.a), op(x.b, y.b)}
#define GOSSAMER_EACH_TRIPLE(op) {op(x.a, y.a, z.a), op(x.b, y.b, z.b)}
#define GOSSAMER_EACH_LOAD(op, p) {op(p), op(p + 16)}
#define GOSSAMER_EACH_STORE(op, p) op(p, x.a), op(p + 16, x.b)

struct Avx512 {
  static constexpr int width = 32;
  static constexpr bool kLooksUp = true;
  using Floats = __m512;
  using Ints = __m512i;
  using Doubles = __m512d;
  using Bits16 = __m256i;
  using Bytes = __m256i;
  struct F {
    Floats a, b;
  };
  struct I {
    Ints a, b;
  };

#include "base/lanes_vector.inl"

#include "base/lanes_avx.inl"

  template <int bits>
  static HD I load_packed(const uint8_t* codes, int64_t i) {
    static_assert(bits == 4 || bits == 2 || bits == 1, "codes are packed in 4 bits, 2 bits or 1 bit");
    if constexpr (bits == 4) {
      const __m128i bytes = load_bits8(codes + i / 2), mask = _mm_set1_epi8(15);
      const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
      return {_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)),
              _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(low, high))};
    } else if constexpr (bits == 2) {
      return {codes_of(codes + i / 4), codes_of(codes + i / 4 + 4)};
    } else {
      uint16_t masks[2];
      memcpy(masks, codes + i / 8, sizeof(masks));
      return {_mm512_maskz_set1_epi32(masks[0], 1), _mm512_maskz_set1_epi32(masks[1], 1)};
    }
  }

  static HD void store(int8_t* p, I x) { GOSSAMER_EACH_STORE(store_low_bytes, p); }
  static HD void store(uint8_t* p, I x) { GOSSAMER_EACH_STORE(store_low_bytes, p); }
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, I x) {
    static_assert(bits == 4 || bits == 2 || bits == 1, "codes are packed in 4 bits, 2 bits or 1 bit");
    if constexpr (bits == 1) {
      const uint16_t masks[2] = {_mm512_test_epi32_mask(x.a, x.a), _mm512_test_epi32_mask(x.b, x.b)};
      memcpy(codes + i / 8, masks, sizeof(masks));
    } else {
      store_packed<bits>(codes, i, bytes_of(x));
    }
  }
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, Bytes bytes) {
    static_assert(bits == 4 || bits == 2, "codes are packed in 4 bits, 2 bits or 1 bit");
    const __m256i pairs =
        _mm256_maddubs_epi16(bytes, _mm256_set1_epi16((1 << bits << 8) + 1));  // first + second << bits
    if constexpr (bits == 4) {
      store_bits8(codes + i / 2, _mm256_cvtepi16_epi8(pairs));
    } else {
      const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));  // pair + 16 * next pair
      _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i / 4), _mm256_cvtepi32_epi8(fours));
    }
  }

  template <int first, int last, int... steps>
  static HD Bytes by_steps(I x) {
    return avx_by_steps<first, last, steps...>(bytes_of(x));
  }
  static HD Bytes bytes_of(I x) {  // -128 or 127 beyond
    return _mm256_set_m128i(_mm512_cvtsepi32_epi8(x.b), _mm512_cvtsepi32_epi8(x.a));
  }

  static HD I set(int32_t value) {
    const __m512i x = _mm512_set1_epi32(value);
    return {x, x};
  }
  static HD int32_t reduce_min(I x) { return _mm512_reduce_min_epi32(_mm512_min_epi32(x.a, x.b)); }
  static HD int32_t reduce_max(I x) { return _mm512_reduce_max_epi32(_mm512_max_epi32(x.a, x.b)); }

  static HD F drawn(uint32_t first, uint32_t second, int64_t i) {
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto index = static_cast<int32_t>(static_cast<uint32_t>(i / 2) + first);
    const __m512i start = scramble(_mm512_add_epi32(places, _mm512_set1_epi32(index)));
    const __m512i words = scramble(_mm512_xor_si512(start, _mm512_set1_epi32(static_cast<int32_t>(second))));
    return {one_and_fraction(_mm512_slli_epi32(words, 7)), one_and_fraction(_mm512_srli_epi32(words, 9))};
  }

  static HD Ints rotated_by_one(Ints x) { return _mm512_rol_epi32(x, 1); }
  static HD Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
  static HD Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
  static HD Bits16 load_bits16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static HD __m128i load_bits8(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static HD void store_bits16(void* p, Bits16 x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static HD void store_bits8(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static HD Bits16 narrowed(Ints x) { return _mm512_cvtepi32_epi16(x); }
  static HD void store_low_bytes(void* p, Ints x) { store_bits8(p, _mm512_cvtepi32_epi8(x)); }

  static HD __m512i codes_of(const uint8_t* p) {  // sixteen codes of 2 bits
    int32_t word;
    memcpy(&word, p, sizeof(word));
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(word), places), _mm512_set1_epi32(3));
  }

  static HD Doubles load_wide(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
  static HD Floats load_register(const double* p) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(p)), high = _mm512_cvtpd_ps(_mm512_loadu_pd(p + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static HD Doubles low(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
  static HD Doubles high(Floats x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
  static HD Floats quiet(Floats x) {
    const __m512 nan = as_floats(_mm512_set1_epi32(kNanBits));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  }
  static HD Bits16 to_half(Floats x) { return _mm512_cvtps_ph(quiet(x), _MM_FROUND_TO_NEAREST_INT); }
  static HD Floats rint(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static HD Floats floor(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  static HD Ints looked_up(__m256i eight, Ints index) {
    return _mm512_permutexvar_epi32(index, _mm512_broadcast_i32x8(eight));
  }
  static HD Ints count_less(Floats x, Floats y, Ints count) {
    return _mm512_mask_add_epi32(count, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), count, _mm512_set1_epi32(1));
  }
  static HD Ints with_sign(Ints x, Floats sign) {
    return _mm512_mask_sub_epi32(x, _mm512_movepi32_mask(as_ints(sign)), _mm512_setzero_si512(), x);
  }
  static HD Floats less(Floats x, Floats y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), _mm512_set1_ps(1.0f));
  }
  static HD Ints is_negative(Floats x) {
    return _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), 1);
  }
};
using WidestLane = Avx512;

#undef GOSSAMER_EACH
#undef GOSSAMER_EACH_WITH
#undef GOSSAMER_EACH_PAIR
#undef GOSSAMER_EACH_TRIPLE
#undef GOSSAMER_EACH_LOAD
#undef GOSSAMER_EACH_STORE

}  // namespace gossamer::GOSSAMER_ISA
