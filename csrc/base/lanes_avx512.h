// The AVX-512 lane (F, BW, DQ, VL): 32 floats in two registers, the width of the AVX2 lane.
// Included by lanes.h where the compile flags allow it; the interface is Scalar's.
#pragma once

#include <immintrin.h>

namespace gossamer::GOSSAMER_ISA {

#define GOSSAMER_EACH(op) {op(x.a), op(x.b)}
#define GOSSAMER_EACH_WITH(op, y) {op(x.a, y), op(x.b, y)}
#define GOSSAMER_EACH_PAIR(op) {op(x.a, y.a), op(x.b, y.b)}
#define GOSSAMER_EACH_LOAD(op, p) {op(p), op(p + 16)}
#define GOSSAMER_EACH_STORE(op, p) op(p, x.a), op(p + 16, x.b)

struct Avx512 {
  static constexpr int width = 32;
  struct F {
    __m512 a, b;
  };
  struct I {
    __m512i a, b;
  };
  using Tail = Scalar;

  static HD F load(const float* p) { return GOSSAMER_EACH_LOAD(_mm512_loadu_ps, p); }
  static HD F load(const double* p) { return GOSSAMER_EACH_LOAD(load16, p); }
  static HD F load(const Half* p) { return GOSSAMER_EACH_LOAD(load16, p); }
  static HD F load(const Bfloat* p) { return GOSSAMER_EACH_LOAD(load16, p); }
  static HD I load(const int8_t* p) { return GOSSAMER_EACH_LOAD(load16, p); }
  static HD I load(const uint8_t* p) { return GOSSAMER_EACH_LOAD(load16, p); }
  template <int bits>
  static HD I load_packed(const uint8_t* codes, int64_t i) {
    static_assert(bits == 4 || bits == 1, "codes are packed 4 bits or 1 bit");
    if constexpr (bits == 4) {
      const __m128i bytes = load128(codes + i / 2), mask = _mm_set1_epi8(15);
      const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
      return {_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)),
              _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(low, high))};
    } else {
      uint16_t masks[2];
      memcpy(masks, codes + i / 8, sizeof(masks));
      return {_mm512_maskz_set1_epi32(masks[0], 1), _mm512_maskz_set1_epi32(masks[1], 1)};
    }
  }

  static HD void store(float* p, F x) { GOSSAMER_EACH_STORE(_mm512_storeu_ps, p); }
  static HD void store(double* p, F x) { GOSSAMER_EACH_STORE(store16, p); }
  static HD void store(Half* p, F x) { GOSSAMER_EACH_STORE(store16, p); }
  static HD void store(Bfloat* p, F x) { GOSSAMER_EACH_STORE(store16, p); }
  static HD void store(int8_t* p, I x) { GOSSAMER_EACH_STORE(store16, p); }
  static HD void store(uint8_t* p, I x) { GOSSAMER_EACH_STORE(store16, p); }
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, I x) {
    static_assert(bits == 4 || bits == 1, "codes are packed 4 bits or 1 bit");
    if constexpr (bits == 4) {
      const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(x.b), _mm512_cvtepi32_epi8(x.a));
      const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // low + 16 * high
      store128(codes + i / 2, _mm256_cvtepi16_epi8(pairs));
    } else {
      const uint16_t masks[2] = {_mm512_test_epi32_mask(x.a, x.a), _mm512_test_epi32_mask(x.b, x.b)};
      memcpy(codes + i / 8, masks, sizeof(masks));
    }
  }
  static HD void add_to(float* p, F x) { GOSSAMER_EACH_STORE(add16, p); }
  static HD void add_to(double* p, F x) { GOSSAMER_EACH_STORE(add16, p); }

  static HD F rounded(F x, float) { return x; }
  static HD F rounded(F x, double) { return x; }
  static HD F rounded(F x, Half) { return GOSSAMER_EACH(through_half); }
  static HD F rounded(F x, Bfloat) { return GOSSAMER_EACH(through_bfloat); }

  static HD F add(F x, float y) { return GOSSAMER_EACH_WITH(_mm512_add_ps, _mm512_set1_ps(y)); }
  static HD F sub(F x, float y) { return GOSSAMER_EACH_WITH(_mm512_sub_ps, _mm512_set1_ps(y)); }
  static HD F mul(F x, float y) { return GOSSAMER_EACH_WITH(_mm512_mul_ps, _mm512_set1_ps(y)); }
  static HD F div(F x, float y) { return GOSSAMER_EACH_WITH(_mm512_div_ps, _mm512_set1_ps(y)); }
  static HD F min(F x, float y) { return GOSSAMER_EACH_WITH(_mm512_min_ps, _mm512_set1_ps(y)); }
  static HD F max(F x, float y) { return GOSSAMER_EACH_WITH(_mm512_max_ps, _mm512_set1_ps(y)); }
  static HD F add(F x, F y) { return GOSSAMER_EACH_PAIR(_mm512_add_ps); }
  static HD F sub(F x, F y) { return GOSSAMER_EACH_PAIR(_mm512_sub_ps); }
  static HD F mul(F x, F y) { return GOSSAMER_EACH_PAIR(_mm512_mul_ps); }
  static HD F less(F x, F y) { return GOSSAMER_EACH_PAIR(less16); }
  static HD F with_sign(F x, F y) { return GOSSAMER_EACH_PAIR(with_sign16); }
  static HD I is_negative(F x) { return GOSSAMER_EACH(is_negative16); }
  static HD F magnitude_of(F x) { return GOSSAMER_EACH(magnitude_of16); }
  static HD F sqrt(F x) { return GOSSAMER_EACH(_mm512_sqrt_ps); }
  static HD F floor(F x) { return GOSSAMER_EACH(floor16); }
  static HD F quiet(F x) { return GOSSAMER_EACH(quiet16); }
  static HD F rint(F x) { return GOSSAMER_EACH(rint16); }
  static HD I to_int(F x) { return GOSSAMER_EACH(_mm512_cvtps_epi32); }
  static HD F to_float(I x) { return GOSSAMER_EACH(_mm512_cvtepi32_ps); }

  static HD I set(int32_t value) {
    const __m512i x = _mm512_set1_epi32(value);
    return {x, x};
  }
  static HD I min_int(I x, I y) { return GOSSAMER_EACH_PAIR(_mm512_min_epi32); }
  static HD I max_int(I x, I y) { return GOSSAMER_EACH_PAIR(_mm512_max_epi32); }
  static HD int32_t reduce_min(I x) { return _mm512_reduce_min_epi32(_mm512_min_epi32(x.a, x.b)); }
  static HD int32_t reduce_max(I x) { return _mm512_reduce_max_epi32(_mm512_max_epi32(x.a, x.b)); }

  static HD I magnitude(F x) { return GOSSAMER_EACH(magnitude16); }
  static HD I ordered(F x) { return GOSSAMER_EACH(ordered16); }

  static HD F fractions(uint32_t first, uint32_t second, int64_t i) {
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto index = static_cast<int32_t>(static_cast<uint32_t>(i / 2) + first);
    const __m512i start = scramble16(_mm512_add_epi32(places, _mm512_set1_epi32(index)));
    const __m512i words =
        scramble16(_mm512_xor_si512(start, _mm512_set1_epi32(static_cast<int32_t>(second))));
    return {fraction16(_mm512_and_si512(words, _mm512_set1_epi32(0xffff))),
            fraction16(_mm512_srli_epi32(words, 16))};
  }

  // One register of sixteen; 16-bit numbers so, for the lanes of optim/ as well.
  static HD __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static HD __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static HD void store128(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static HD void store256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }

  static HD __m512 load16(const double* p) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(p)), high = _mm512_cvtpd_ps(_mm512_loadu_pd(p + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static HD __m512 load16(const Half* p) { return _mm512_cvtph_ps(load256(p)); }
  static HD __m512 load16(const Bfloat* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16));
  }
  static HD __m512i load16(const int8_t* p) { return _mm512_cvtepi8_epi32(load128(p)); }
  static HD __m512i load16(const uint8_t* p) { return _mm512_cvtepu8_epi32(load128(p)); }

  static HD __m512d low8(__m512 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
  static HD __m512d high8(__m512 x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
  static HD void store16(double* p, __m512 x) {
    _mm512_storeu_pd(p, low8(x));
    _mm512_storeu_pd(p + 8, high8(x));
  }
  static HD __m256i to_half(__m512 x) { return _mm512_cvtps_ph(quiet16(x), _MM_FROUND_TO_NEAREST_INT); }
  static HD void store16(Half* p, __m512 x) { store256(p, to_half(x)); }
  static HD __m512i to_bfloat(__m512 x) {
    const __m512i bits = _mm512_castps_si512(quiet16(x));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  }
  static HD void store16(Bfloat* p, __m512 x) { store256(p, _mm512_cvtepi32_epi16(to_bfloat(x))); }
  static HD void store16(int8_t* p, __m512i x) { store128(p, _mm512_cvtepi32_epi8(x)); }
  static HD void store16(uint8_t* p, __m512i x) { store128(p, _mm512_cvtepi32_epi8(x)); }
  static HD void add16(float* p, __m512 x) { _mm512_storeu_ps(p, _mm512_add_ps(_mm512_loadu_ps(p), x)); }
  static HD void add16(double* p, __m512 x) {
    _mm512_storeu_pd(p, _mm512_add_pd(_mm512_loadu_pd(p), low8(x)));
    _mm512_storeu_pd(p + 8, _mm512_add_pd(_mm512_loadu_pd(p + 8), high8(x)));
  }

  static HD __m512 through_half(__m512 x) { return _mm512_cvtph_ps(to_half(x)); }
  static HD __m512 through_bfloat(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(to_bfloat(x), 16));
  }
  static HD __m512 quiet16(__m512 x) {
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(kNanBits));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  }
  static HD __m512 rint16(__m512 x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static HD __m512 floor16(__m512 x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  static HD __m512 less16(__m512 x, __m512 y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), _mm512_set1_ps(1.0f));
  }
  static HD __m512i is_negative16(__m512 x) {
    return _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), 1);
  }
  static HD __m512 magnitude_of16(__m512 x) { return _mm512_castsi512_ps(magnitude16(x)); }
  static HD __m512 with_sign16(__m512 x, __m512 sign) {
    return _mm512_or_ps(magnitude_of16(x), _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
  }
  static HD __m512i scramble16(__m512i x) {
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(kScramble1));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)),
                           _mm512_set1_epi32(static_cast<int32_t>(kScramble2)));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  }
  static HD __m512 fraction16(__m512i x) {
    const __m512 whole = _mm512_mul_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(1.0f / 65536));
    return _mm512_add_ps(whole, _mm512_set1_ps(0.5f / 65536));
  }
  static HD __m512i magnitude16(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  }
  static HD __m512i ordered16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    return _mm512_xor_si512(bits, _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1));
  }
};

#undef GOSSAMER_EACH
#undef GOSSAMER_EACH_WITH
#undef GOSSAMER_EACH_PAIR
#undef GOSSAMER_EACH_LOAD
#undef GOSSAMER_EACH_STORE

}  // namespace gossamer::GOSSAMER_ISA
