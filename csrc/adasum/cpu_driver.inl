// The loops of Adasum. Included once by each cpu_*.cpp, after base/instruction_set.h. Free of std:: code: everything here is
// compiled with that file's flags.
//
// Element i of a part is added to sum i % 16 of each kind; the sixteen sums are then added in pairs. So every instruction
// set adds in the same order. The last elements are padded with zeros to sixteen, which changes no sum.

#include <cstring>
#include <type_traits>

#include "adasum/adasum.h"

#if !defined(GOSSAMER_LACKS_FLAGS)
namespace gossamer::GOSSAMER_ISA {
namespace {

using adasum::Factors;
using adasum::Sums;

constexpr int64_t kStep = 16;   // elements
constexpr int64_t kTile = 512;  // 16-bit elements that are widened to float32 at a time
constexpr int kWidth = kVectorBytes / sizeof(double);
constexpr int kVectors = kStep / kWidth;

// Vectors of the compiler (GCC, Clang).
typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef float Floats __attribute__((vector_size(kVectorBytes / 2)));

HD Doubles load(const double* p) {
  Doubles x;
  memcpy(&x, p, sizeof(x));
  return x;
}
HD Doubles load(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, Doubles);
}
HD void store(double* p, Doubles x) { memcpy(p, &x, sizeof(x)); }
HD void store(float* p, Doubles x) {
  const Floats y = __builtin_convertvector(x, Floats);
  memcpy(p, &y, sizeof(y));
}

HD double total(const Doubles* sums) {
  double x[kStep];
  memcpy(x, sums, sizeof(x));
  for (int64_t half = kStep / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

struct Running {
  Doubles dot[kVectors], a[kVectors], b[kVectors];
};

// numel is a multiple of kStep.
template <class N>
HD void add(Running& running, const N* a, const N* b, int64_t numel) {
  Running sums = running;  // a copy stays in registers
  for (int64_t i = 0; i < numel; i += kStep) {
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) {
      const Doubles x = load(a + i + k * kWidth), y = load(b + i + k * kWidth);
      sums.dot[k] += x * y;
      sums.a[k] += x * x;
      sums.b[k] += y * y;
    }
  }
  running = sums;
}

template <class N>
HD void combine_steps(N* a, const N* b, int64_t numel, const Factors& factors) {
  const Doubles factor_a = Doubles{} + factors.a, factor_b = Doubles{} + factors.b;
  const Doubles nan = Doubles{} + __builtin_nan("");
  for (int64_t i = 0; i < numel; i += kStep) {
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) {
      N* const p = a + i + k * kWidth;
      const Doubles sum = load(p) * factor_a + load(b + i + k * kWidth) * factor_b;
      store(p, sum == sum ? sum : nan);
    }
  }
}

constexpr int64_t up(int64_t numel, int64_t step) { return (numel + step - 1) / step * step; }

// Widens `numel` elements of 16 bits, and adds zeros up to the next multiple of kPad.
constexpr int64_t kPad = VectorLane::width > kStep ? VectorLane::width : kStep;

template <class T>
HD void widen(const T* from, int64_t numel, float* to) {
  const int64_t whole = numel / kPad * kPad;
  for (int64_t i = 0; i < whole; i += VectorLane::width)
    VectorLane::store(to + i, VectorLane::load(from + i));
  if (whole == numel) return;
  T last[kPad] = {};
  memcpy(last, from + whole, (numel - whole) * sizeof(T));
  for (int64_t i = 0; i < kPad; i += VectorLane::width)
    VectorLane::store(to + whole + i, VectorLane::load(last + i));
}

template <class T>
HD void narrow(const float* from, int64_t numel, T* to) {
  const int64_t whole = numel / kPad * kPad;
  for (int64_t i = 0; i < whole; i += VectorLane::width)
    VectorLane::store(to + i, VectorLane::load(from + i));
  if (whole == numel) return;
  T last[kPad];
  for (int64_t i = 0; i < kPad; i += VectorLane::width)
    VectorLane::store(last + i, VectorLane::load(from + whole + i));
  memcpy(to + whole, last, (numel - whole) * sizeof(T));
}

template <class T>
constexpr bool kIsNarrow = sizeof(T) == 2;

template <class T>
Sums sums_of(const T* a, const T* b, int64_t numel) {
  Running running{};
  if constexpr (kIsNarrow<T>) {
    for (int64_t i = 0; i < numel; i += kTile) {
      const int64_t n = numel - i < kTile ? numel - i : kTile;
      alignas(64) float x[kTile], y[kTile];
      widen(a + i, n, x);
      widen(b + i, n, y);
      add(running, x, y, up(n, kPad));
    }
  } else {
    const int64_t whole = numel / kStep * kStep, left = numel - whole;
    add(running, a, b, whole);
    if (left > 0) {
      T x[kStep] = {}, y[kStep] = {};
      memcpy(x, a + whole, left * sizeof(T));
      memcpy(y, b + whole, left * sizeof(T));
      add(running, x, y, kStep);
    }
  }
  return {total(running.dot), total(running.a), total(running.b)};
}

template <class T>
void combine_into(T* a, const T* b, int64_t numel, const Factors& factors) {
  if constexpr (kIsNarrow<T>) {
    for (int64_t i = 0; i < numel; i += kTile) {
      const int64_t n = numel - i < kTile ? numel - i : kTile;
      alignas(64) float x[kTile], y[kTile];
      widen(a + i, n, x);
      widen(b + i, n, y);
      combine_steps(x, y, up(n, kPad), factors);
      narrow(x, n, a + i);
    }
  } else {
    const int64_t whole = numel / kStep * kStep, left = numel - whole;
    combine_steps(a, b, whole, factors);
    if (left > 0) {
      T x[kStep] = {}, y[kStep] = {};
      memcpy(x, a + whole, left * sizeof(T));
      memcpy(y, b + whole, left * sizeof(T));
      combine_steps(x, y, kStep, factors);
      memcpy(a + whole, x, left * sizeof(T));
    }
  }
}

// body(T{}) for the element type that `dtype` names.
template <class Body>
auto with_element_type(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::f64: return body(double{});
    case Dtype::f16: return body(Half{});
    case Dtype::bf16: return body(Bfloat{});
    default: return body(float{});
  }
}

Sums sums(Dtype dtype, const void* a, const void* b, int64_t numel) {
  return with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    return sums_of(static_cast<const T*>(a), static_cast<const T*>(b), numel);
  });
}

void combine(Dtype dtype, void* a, const void* b, int64_t numel, const Factors& factors) {
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    combine_into(static_cast<T*>(a), static_cast<const T*>(b), numel, factors);
  });
}

}  // namespace
}  // namespace gossamer::GOSSAMER_ISA
#endif

namespace gossamer::adasum {
GOSSAMER_KERNEL_TABLE(GOSSAMER_ISA::sums, GOSSAMER_ISA::combine);
}  // namespace gossamer::adasum
