// The AVX2 lane: 32 floats in four registers, so that 32 codes leave in one store.
// Included by lanes.h where the compile flags allow it; the interface is Scalar's.
#pragma once

#include <immintrin.h>

namespace gossamer::GOSSAMER_ISA {

#define GOSSAMER_EACH(op) {op(x.a), op(x.b), op(x.c), op(x.d)}
#define GOSSAMER_EACH_WITH(op, y) {op(x.a, y), op(x.b, y), op(x.c, y), op(x.d, y)}
#define GOSSAMER_EACH_PAIR(op) {op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)}
#define GOSSAMER_EACH_LOAD(op, p) {op(p), op(p + 8), op(p + 16), op(p + 24)}
#define GOSSAMER_EACH_STORE(op, p) op(p, x.a), op(p + 8, x.b), op(p + 16, x.c), op(p + 24, x.d)

struct Avx2 {
  static constexpr int width = 32;
  struct F {
    __m256 a, b, c, d;
  };
  struct I {
    __m256i a, b, c, d;
  };
  using Tail = Scalar;

  static HD F load(const float* p) { return GOSSAMER_EACH_LOAD(_mm256_loadu_ps, p); }
  static HD F load(const double* p) { return GOSSAMER_EACH_LOAD(load8, p); }
  static HD F load(const Half* p) { return GOSSAMER_EACH_LOAD(load8, p); }
  static HD F load(const Bfloat* p) { return GOSSAMER_EACH_LOAD(load8, p); }
  static HD I load(const int8_t* p) { return GOSSAMER_EACH_LOAD(load8, p); }
  static HD I load(const uint8_t* p) { return GOSSAMER_EACH_LOAD(load8, p); }
  template <int bits>
  static HD I load_packed(const uint8_t* codes, int64_t i) {
    static_assert(bits == 4 || bits == 1, "codes are packed 4 bits or 1 bit");
    if constexpr (bits == 4) {
      const __m128i bytes = load128(codes + i / 2), mask = _mm_set1_epi8(15);
      const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
      const __m128i first = _mm_unpacklo_epi8(low, high), last = _mm_unpackhi_epi8(low, high);
      return {_mm256_cvtepu8_epi32(first), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(first, first)),
              _mm256_cvtepu8_epi32(last), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(last, last))};
    } else {
      const uint8_t* p = codes + i / 8;
      return {bits8(p[0]), bits8(p[1]), bits8(p[2]), bits8(p[3])};
    }
  }

  static HD void store(float* p, F x) { GOSSAMER_EACH_STORE(_mm256_storeu_ps, p); }
  static HD void store(double* p, F x) { GOSSAMER_EACH_STORE(store8, p); }
  static HD void store(Half* p, F x) { GOSSAMER_EACH_STORE(store8, p); }
  static HD void store(Bfloat* p, F x) { GOSSAMER_EACH_STORE(store8, p); }
  static HD void store(int8_t* p, I x) {
    const __m256i low = _mm256_packs_epi32(x.a, x.b), high = _mm256_packs_epi32(x.c, x.d);
    store_bytes(p, _mm256_packs_epi16(low, high));
  }
  static HD void store(uint8_t* p, I x) {
    const __m256i low = _mm256_packs_epi32(x.a, x.b), high = _mm256_packs_epi32(x.c, x.d);
    store_bytes(p, _mm256_packus_epi16(low, high));
  }
  template <int bits>
  static HD void store_packed(uint8_t* codes, int64_t i, I x) {
    static_assert(bits == 4 || bits == 1, "codes are packed 4 bits or 1 bit");
    if constexpr (bits == 4) {
      const __m256i low = _mm256_packs_epi32(x.a, x.b), high = _mm256_packs_epi32(x.c, x.d);
      const __m256i bytes = in_order(_mm256_packus_epi16(low, high));
      const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // low + 16 * high
      store128(codes + i / 2,
               _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
    } else {
      uint8_t* p = codes + i / 8;
      p[0] = mask8(x.a), p[1] = mask8(x.b), p[2] = mask8(x.c), p[3] = mask8(x.d);
    }
  }
  static HD void add_to(float* p, F x) { GOSSAMER_EACH_STORE(add8, p); }
  static HD void add_to(double* p, F x) { GOSSAMER_EACH_STORE(add8, p); }

  static HD F rounded(F x, float) { return x; }
  static HD F rounded(F x, double) { return x; }
  static HD F rounded(F x, Half) { return GOSSAMER_EACH(through_half); }
  static HD F rounded(F x, Bfloat) { return GOSSAMER_EACH(through_bfloat); }

  static HD F add(F x, float y) { return GOSSAMER_EACH_WITH(_mm256_add_ps, _mm256_set1_ps(y)); }
  static HD F sub(F x, float y) { return GOSSAMER_EACH_WITH(_mm256_sub_ps, _mm256_set1_ps(y)); }
  static HD F mul(F x, float y) { return GOSSAMER_EACH_WITH(_mm256_mul_ps, _mm256_set1_ps(y)); }
  static HD F div(F x, float y) { return GOSSAMER_EACH_WITH(_mm256_div_ps, _mm256_set1_ps(y)); }
  static HD F min(F x, float y) { return GOSSAMER_EACH_WITH(_mm256_min_ps, _mm256_set1_ps(y)); }
  static HD F max(F x, float y) { return GOSSAMER_EACH_WITH(_mm256_max_ps, _mm256_set1_ps(y)); }
  static HD F add(F x, F y) { return GOSSAMER_EACH_PAIR(_mm256_add_ps); }
  static HD F sub(F x, F y) { return GOSSAMER_EACH_PAIR(_mm256_sub_ps); }
  static HD F mul(F x, F y) { return GOSSAMER_EACH_PAIR(_mm256_mul_ps); }
  static HD F less(F x, F y) { return GOSSAMER_EACH_PAIR(less8); }
  static HD F with_sign(F x, F y) { return GOSSAMER_EACH_PAIR(with_sign8); }
  static HD I is_negative(F x) { return GOSSAMER_EACH(is_negative8); }
  static HD F magnitude_of(F x) { return GOSSAMER_EACH(magnitude_of8); }
  static HD F sqrt(F x) { return GOSSAMER_EACH(_mm256_sqrt_ps); }
  static HD F floor(F x) { return GOSSAMER_EACH(_mm256_floor_ps); }
  static HD F quiet(F x) { return GOSSAMER_EACH(quiet8); }
  static HD F rint(F x) { return GOSSAMER_EACH(rint8); }
  static HD I to_int(F x) { return GOSSAMER_EACH(_mm256_cvtps_epi32); }
  static HD F to_float(I x) { return GOSSAMER_EACH(_mm256_cvtepi32_ps); }

  static HD I set(int32_t value) {
    const __m256i x = _mm256_set1_epi32(value);
    return {x, x, x, x};
  }
  static HD I min_int(I x, I y) { return GOSSAMER_EACH_PAIR(_mm256_min_epi32); }
  static HD I max_int(I x, I y) { return GOSSAMER_EACH_PAIR(_mm256_max_epi32); }
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

  static HD I magnitude(F x) { return GOSSAMER_EACH(magnitude8); }
  static HD I ordered(F x) { return GOSSAMER_EACH(ordered8); }

  static HD F fractions(uint32_t first, uint32_t second, int64_t i) {
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const auto index = static_cast<int32_t>(static_cast<uint32_t>(i / 2) + first);
    const __m256i start = _mm256_add_epi32(places, _mm256_set1_epi32(index));
    const __m256i key = _mm256_set1_epi32(static_cast<int32_t>(second)), mask = _mm256_set1_epi32(0xffff);
    const __m256i u = scramble8(_mm256_xor_si256(scramble8(start), key));
    const __m256i v =
        scramble8(_mm256_xor_si256(scramble8(_mm256_add_epi32(start, _mm256_set1_epi32(8))), key));
    return {fraction8(_mm256_and_si256(u, mask)), fraction8(_mm256_and_si256(v, mask)),
            fraction8(_mm256_srli_epi32(u, 16)), fraction8(_mm256_srli_epi32(v, 16))};
  }

  // One register of eight; 16-bit numbers so, for the lanes of optim/ as well.
  static HD __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static HD __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static HD void store128(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static HD __m256i in_order(__m256i x) {  // packs works within halves: put the quads in order
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static HD void store_bytes(void* p, __m256i x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), in_order(x));
  }
  static HD __m256i bits8(uint8_t byte) {
    const __m256i shifted =
        _mm256_srlv_epi32(_mm256_set1_epi32(byte), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_and_si256(shifted, _mm256_set1_epi32(1));
  }
  static HD uint8_t mask8(__m256i x) {
    return static_cast<uint8_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 31))));
  }

  static HD __m256 load8(const double* p) {
    return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(p + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(p)));
  }
  static HD __m256 load8(const Half* p) { return _mm256_cvtph_ps(load128(p)); }
  static HD __m256 load8(const Bfloat* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
  }
  static HD __m256i load8(const int8_t* p) { return _mm256_cvtepi8_epi32(load64(p)); }
  static HD __m256i load8(const uint8_t* p) { return _mm256_cvtepu8_epi32(load64(p)); }

  static HD __m256d low4(__m256 x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
  static HD __m256d high4(__m256 x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
  static HD void store8(double* p, __m256 x) {
    _mm256_storeu_pd(p, low4(x));
    _mm256_storeu_pd(p + 4, high4(x));
  }
  static HD __m128i to_half(__m256 x) { return _mm256_cvtps_ph(quiet8(x), _MM_FROUND_TO_NEAREST_INT); }
  static HD void store8(Half* p, __m256 x) { store128(p, to_half(x)); }
  static HD __m256i to_bfloat(__m256 x) {
    const __m256i bits = _mm256_castps_si256(quiet8(x));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  }
  static HD void store8(Bfloat* p, __m256 x) {
    const __m256i bits = to_bfloat(x);
    store128(p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
  }
  static HD void add8(float* p, __m256 x) { _mm256_storeu_ps(p, _mm256_add_ps(_mm256_loadu_ps(p), x)); }
  static HD void add8(double* p, __m256 x) {
    _mm256_storeu_pd(p, _mm256_add_pd(_mm256_loadu_pd(p), low4(x)));
    _mm256_storeu_pd(p + 4, _mm256_add_pd(_mm256_loadu_pd(p + 4), high4(x)));
  }

  static HD __m256 through_half(__m256 x) { return _mm256_cvtph_ps(to_half(x)); }
  static HD __m256 through_bfloat(__m256 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(to_bfloat(x), 16));
  }
  static HD __m256 quiet8(__m256 x) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(kNanBits));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static HD __m256 rint8(__m256 x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static HD __m256 less8(__m256 x, __m256 y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ), _mm256_set1_ps(1.0f));
  }
  static HD __m256i is_negative8(__m256 x) {
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ)), 31);
  }
  static HD __m256 magnitude_of8(__m256 x) { return _mm256_castsi256_ps(magnitude8(x)); }
  static HD __m256 with_sign8(__m256 x, __m256 sign) {
    return _mm256_or_ps(magnitude_of8(x), _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
  }
  static HD __m256i scramble8(__m256i x) {
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), _mm256_set1_epi32(kScramble1));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)),
                           _mm256_set1_epi32(static_cast<int32_t>(kScramble2)));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
  }
  static HD __m256 fraction8(__m256i x) {
    const __m256 whole = _mm256_mul_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(1.0f / 65536));
    return _mm256_add_ps(whole, _mm256_set1_ps(0.5f / 65536));
  }
  static HD __m256i magnitude8(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
  }
  static HD __m256i ordered8(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    return _mm256_xor_si256(bits, _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1));
  }
};

#undef GOSSAMER_EACH
#undef GOSSAMER_EACH_WITH
#undef GOSSAMER_EACH_PAIR
#undef GOSSAMER_EACH_LOAD
#undef GOSSAMER_EACH_STORE

}  // namespace gossamer::GOSSAMER_ISA
