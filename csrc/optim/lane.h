// The lanes of the updates: one number (host, CUDA thread) or one vector register of numbers, float32 or float64. They are
// narrower than the lanes of base/lanes.h, which hold 32 floats, because an update keeps four streams and nine constants in
// registers. V has the operators + - * / and unary -, through the compiler's vectors. Included by rules.h.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "base/lanes.h"

namespace gossamer::GOSSAMER_ISA {

// a * b + c, rounded once. Without the instruction it is a library call: correct but slow.
HD float multiply_add(float a, float b, float c) { return ::fmaf(a, b, c); }
HD double multiply_add(double a, double b, double c) { return ::fma(a, b, c); }

HD float square_root(float x) { return Scalar::sqrt(x); }
HD double square_root(double x) { return ::sqrt(x); }

template <class Number>
struct One {
  using N = Number;
  using V = Number;
  static constexpr int width = 1;

  static HD V set(N x) { return x; }
  // Tensors may start at any byte on the host; on a device the caller has checked their alignment.
  template <class T>
  static HD V load(const T* p) {
#if defined(__CUDA_ARCH__)
    return widened(*p);
#else
    T element;
    memcpy(&element, p, sizeof(T));
    return widened(element);
#endif
  }
  template <class T>
  static HD void store(T* p, V x) {
    T element;
    narrow(x, element);
#if defined(__CUDA_ARCH__)
    *p = element;
#else
    memcpy(p, &element, sizeof(T));
#endif
  }

 private:
  static HD V widened(N x) { return x; }
  static HD V widened(Half x) { return Scalar::load(&x); }
  static HD V widened(Bfloat x) { return Scalar::load(&x); }
  static HD void narrow(V x, N& element) { element = x; }
  static HD void narrow(V x, Half& element) { Scalar::store(&element, x); }
  static HD void narrow(V x, Bfloat& element) { Scalar::store(&element, x); }
};

}  // namespace gossamer::GOSSAMER_ISA

#if defined(GOSSAMER_MM) && (defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__))
#include "optim/lane_vector.h"
#else
namespace gossamer::GOSSAMER_ISA {
template <class Number>
using Lane = One<Number>;
}
#endif
