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
  static HD V load(const Half* p) { return Avx2::load8(p); }
  static HD V load(const Bfloat* p) { return Avx2::load8(p); }
  static HD void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static HD void store(Half* p, V x) { Avx2::store8(p, x); }
  static HD void store(Bfloat* p, V x) { Avx2::store8(p, x); }
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
