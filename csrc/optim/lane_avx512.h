// The AVX-512 lanes of the updates: sixteen floats or eight doubles. Included by lane.h where the flags allow
// it; the interface is One's.
#pragma once

#include <immintrin.h>

namespace gossamer::GOSSAMER_ISA {

HD __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
HD __m512d multiply_add(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
HD __m512 square_root(__m512 x) { return _mm512_sqrt_ps(x); }
HD __m512d square_root(__m512d x) { return _mm512_sqrt_pd(x); }

template <class Number>
struct Lane;

template <>
struct Lane<float> {
  using N = float;
  using V = __m512;
  static constexpr int width = 16;

  static HD V set(N x) { return _mm512_set1_ps(x); }
  static HD V load(const float* p) { return _mm512_loadu_ps(p); }
  static HD V load(const Half* p) { return _mm512_cvtph_ps(load16bits(p)); }
  static HD V load(const Bfloat* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16bits(p)), 16));
  }
  static HD void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static HD void store(Half* p, V x) { store16bits(p, _mm512_cvtps_ph(quiet(x), _MM_FROUND_TO_NEAREST_INT)); }
  static HD void store(Bfloat* p, V x) {
    const __m512i bits = _mm512_castps_si512(quiet(x));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    store16bits(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }

 private:
  static HD __m256i load16bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static HD void store16bits(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static HD V quiet(V x) {  // the one NaN, as Scalar::store makes it
    const V nan = _mm512_castsi512_ps(_mm512_set1_epi32(kNanBits));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  }
};

template <>
struct Lane<double> {
  using N = double;
  using V = __m512d;
  static constexpr int width = 8;

  static HD V set(N x) { return _mm512_set1_pd(x); }
  static HD V load(const double* p) { return _mm512_loadu_pd(p); }
  static HD void store(double* p, V x) { _mm512_storeu_pd(p, x); }
};

}  // namespace gossamer::GOSSAMER_ISA
