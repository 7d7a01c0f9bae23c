// The AVX2 lane: 32 floats in four registers, so that 32 codes leave in one store.
// Included by lanes.h where the compile flags allow it; the interface is Scalar's.
#pragma once

#include <immintrin.h>

#include "base/lanes_avx_bytes.h"

#define GOSSAMER_MM(op) _mm256_##op
#define GOSSAMER_MM_SI(op) _mm256_##op##256

namespace gossamer::GOSSAMER_ISA {

struct Avx2 {
  static constexpr int width = 32;
  static constexpr bool kLooksUp = true;
  using Floats = __m256;
  using Ints = __m256i;
  using Doubles = __m256d;
  using Bits16 = __m128i;
  using Bytes = __m256i;

#include "base/lanes_four.inl"
#include "base/lanes_vector.inl"

#include "base/lanes_avx.inl"

  template <int bits>
  static HD I load_packed(const uint8_t* codes, int64_t i) {
    static_assert(bits == 4 || bits == 2 || bits == 1, "codes are packed in 4 bits, 2 bits or 1 bit");
    if constexpr (bits == 4) {
      const __m128i bytes = load_bits16(codes + i / 2), mask = _mm_set1_epi8(15);
      const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
      const __m128i first = _mm_unpacklo_epi8(low, high), last = _mm_unpackhi_epi8(low, high);
      return {_mm256_cvtepu8_epi32(first), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(first, first)),
              _mm256_cvtepu8_epi32(last), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(last, last))};
    } else {
      const uint8_t* p = codes + i * bits / 8;
      return {codes_of<bits>(p), codes_of<bits>(p + bits), codes_of<bits>(p + 2 * bits),
              codes_of<bits>(p + 3 * bits)};
    }
  }

  static HD void store(int8_t* p, I x) { store_bytes(p, bytes_of(x)); }
  static HD void store(uint8_t* p, I x) {
    const __m256i low = _mm256_packs_epi32(x.a, x.b), high = _mm256_packs_epi32(x.c, x.d);
    store_bytes(p, in_order(_mm256_packus_epi16(low, high)));
  }
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, I x) {
    store_packed<bits>(codes, i, bytes_of(x));
  }
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, Bytes bytes) {
    static_assert(bits == 4 || bits == 2 || bits == 1, "codes are packed in 4 bits, 2 bits or 1 bit");
    if constexpr (bits == 1) {
      const int32_t mask = _mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7));
      memcpy(codes + i / 8, &mask, sizeof(mask));
      return;
    }
    const __m256i pairs =
        _mm256_maddubs_epi16(bytes, _mm256_set1_epi16((1 << bits << 8) + 1));  // first + second << bits
    const __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
    if constexpr (bits == 4) {
      store_bits16(codes + i / 2, _mm_packus_epi16(low, high));
    } else {
      const __m128i ones = _mm_set1_epi32(0x00100001);  // pair + 16 * next pair
      const __m128i words = _mm_packus_epi32(_mm_madd_epi16(low, ones), _mm_madd_epi16(high, ones));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i / 4), _mm_packus_epi16(words, words));
    }
  }

  template <int first, int last, int... steps>
  static HD Bytes by_steps(I x) {
    return avx_by_steps<first, last, steps...>(bytes_of(x));
  }
  static HD Bytes bytes_of(I x) {  // -128 or 127 beyond
    const __m256i low = _mm256_packs_epi32(x.a, x.b), high = _mm256_packs_epi32(x.c, x.d);
    return in_order(_mm256_packs_epi16(low, high));
  }

  static HD I set(int32_t value) {
    const __m256i x = _mm256_set1_epi32(value);
    return {x, x, x, x};
  }
  static HD int32_t reduce_min(I x) {
    const __m256i m = _mm256_min_epi32(_mm256_min_epi32(x.a, x.b), _mm256_min_epi32(x.c, x.d));
    __m128i n = _mm_min_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    n = _mm_min_epi32(n, _mm_shuffle_epi32(n, 0x4e));
    return _mm_cvtsi128_si32(_mm_min_epi32(n, _mm_shuffle_epi32(n, 0xb1)));
  }
  static HD int32_t reduce_max(I x) {
    const __m256i m = _mm256_max_epi32(_mm256_max_epi32(x.a, x.b), _mm256_max_epi32(x.c, x.d));
    __m128i n = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    n = _mm_max_epi32(n, _mm_shuffle_epi32(n, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(n, _mm_shuffle_epi32(n, 0xb1)));
  }

  static HD F drawn(uint32_t first, uint32_t second, int64_t i) {
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const auto index = static_cast<int32_t>(static_cast<uint32_t>(i / 2) + first);
    const __m256i start = _mm256_add_epi32(places, _mm256_set1_epi32(index));
    const __m256i key = _mm256_set1_epi32(static_cast<int32_t>(second));
    const __m256i u = scramble(_mm256_xor_si256(scramble(start), key));
    const __m256i v =
        scramble(_mm256_xor_si256(scramble(_mm256_add_epi32(start, _mm256_set1_epi32(8))), key));
    return {one_and_fraction(_mm256_slli_epi32(u, 7)), one_and_fraction(_mm256_slli_epi32(v, 7)),
            one_and_fraction(_mm256_srli_epi32(u, 9)), one_and_fraction(_mm256_srli_epi32(v, 9))};
  }

  static HD Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
  static HD Ints as_ints(Floats x) { return _mm256_castps_si256(x); }
  static HD Bits16 load_bits16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static HD __m128i load_bits8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static HD void store_bits16(void* p, Bits16 x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static HD Bits16 narrowed(Ints x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  static HD __m256i in_order(__m256i x) {  // packs works within halves: put the quads in order
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static HD void store_bytes(void* p, Bytes x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  template <int bits>
  static HD __m256i codes_of(const uint8_t* p) {  // eight codes
    const int32_t word = bits == 1 ? p[0] : p[0] | p[1] << 8;
    const __m256i places =
        _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bits));
    const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(word), places);
    return _mm256_and_si256(shifted, _mm256_set1_epi32((1 << bits) - 1));
  }

  static HD Doubles load_wide(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
  static HD Floats load_register(const double* p) {
    return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(p + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(p)));
  }
  static HD Doubles low(Floats x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
  static HD Doubles high(Floats x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
  static HD Floats quiet(Floats x) {
    const __m256 nan = as_floats(_mm256_set1_epi32(kNanBits));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static HD Bits16 to_half(Floats x) { return _mm256_cvtps_ph(quiet(x), _MM_FROUND_TO_NEAREST_INT); }
  static HD Floats rint(Floats x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static HD Floats floor(Floats x) { return _mm256_floor_ps(x); }
  static HD Ints looked_up(__m256i eight, Ints index) { return _mm256_permutevar8x32_epi32(eight, index); }
  static HD Ints count_less(Floats x, Floats y, Ints count) {
    return _mm256_sub_epi32(count, as_ints(_mm256_cmp_ps(x, y, _CMP_LT_OQ)));
  }
  static HD Ints with_sign(Ints x, Floats sign) { return _mm256_sign_epi32(x, as_ints(sign)); }  // 0 for +0
  static HD Floats less(Floats x, Floats y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ), _mm256_set1_ps(1.0f));
  }
  static HD Ints is_negative(Floats x) {
    return _mm256_srli_epi32(as_ints(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ)), 31);
  }
};
using WidestLane = Avx2;

#undef GOSSAMER_EACH
#undef GOSSAMER_EACH_WITH
#undef GOSSAMER_EACH_PAIR
#undef GOSSAMER_EACH_TRIPLE
#undef GOSSAMER_EACH_LOAD
#undef GOSSAMER_EACH_STORE

}  // namespace gossamer::GOSSAMER_ISA
