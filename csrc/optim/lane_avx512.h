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
  static HD V load(const Half* p) { return Avx512::load16(p); }
  static HD V load(const Bfloat* p) { return Avx512::load16(p); }
  static HD void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static HD void store(Half* p, V x) { Avx512::store16(p, x); }
  static HD void store(Bfloat* p, V x) { Avx512::store16(p, x); }
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
