// The AVX2 lanes of the updates: eight floats or four doubles. Included by lane.h where the flags allow it; the
// interface is One's.
#pragma once

#include <immintrin.h>

namespace gossamer::GOSSAMER_ISA {

HD __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
HD __m256d multiply_add(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
HD __m256 square_root(__m256 x) { return _mm256_sqrt_ps(x); }
HD __m256d square_root(__m256d x) { return _mm256_sqrt_pd(x); }

template <class Number>
struct Lane;

template <>
struct Lane<float> {
  using N = float;
  using V = __m256;
  static constexpr int width = 8;

  static HD V set(N x) { return _mm256_set1_ps(x); }
  static HD V load(const float* p) { return _mm256_loadu_ps(p); }
  static HD V load(const Half* p) { return _mm256_cvtph_ps(load16bits(p)); }
  static HD V load(const Bfloat* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16bits(p)), 16));
  }
  static HD void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static HD void store(Half* p, V x) { store16bits(p, _mm256_cvtps_ph(quiet(x), _MM_FROUND_TO_NEAREST_INT)); }
  static HD void store(Bfloat* p, V x) {
    const __m256i bits = _mm256_castps_si256(quiet(x));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    store16bits(p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }

 private:
  static HD __m128i load16bits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static HD void store16bits(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static HD V quiet(V x) {  // the one NaN, as Scalar::store makes it
    const V nan = _mm256_castsi256_ps(_mm256_set1_epi32(kNanBits));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
};

template <>
struct Lane<double> {
  using N = double;
  using V = __m256d;
  static constexpr int width = 4;

  static HD V set(N x) { return _mm256_set1_pd(x); }
  static HD V load(const double* p) { return _mm256_loadu_pd(p); }
  static HD void store(double* p, V x) { _mm256_storeu_pd(p, x); }
};

}  // namespace gossamer::GOSSAMER_ISA
