// The arithmetic of flat memory, shared by flat.cpp, flat_cuda.cu and sum_cuda.cu: one element times `scale`, and the
// sum of one element over rows, computed in the accumulate dtype. Not included elsewhere.
#pragma once

#include <type_traits>

#include "base/dtype.h"
#include "base/lanes.h"

namespace gossamer::GOSSAMER_ISA {

// Float64 tensors keep float64; the others pass through float32.
template <class T>
struct Scaled {
  using Lane = std::conditional_t<std::is_same_v<T, double>, Double, Scalar>;
  typename Lane::F factor;
  HD T operator()(T x) const {
    Lane::store(&x, Lane::mul(Lane::load(&x), factor));
    return x;
  }
};

// The sum of one element over rows, which begins at zero.
template <class T>
struct Summed {
  using Lane = std::conditional_t<std::is_same_v<T, double>, Double, Scalar>;
  using Sum = typename Lane::F;
  static HD void add(Sum& sum, const T& x) { Lane::add_to(&sum, Lane::load(&x)); }
  static HD T finish(Sum sum, Sum scale) {
    T x;
    Lane::store(&x, Lane::quiet(Lane::mul(sum, scale)));  // one NaN on all devices
    return x;
  }
};

// body(T{}) for the element type that `dtype` names.
template <class Body>
void with_element_type(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::f32: return body(float{});
    case Dtype::f64: return body(double{});
    case Dtype::f16: return body(Half{});
    case Dtype::bf16: return body(Bfloat{});
  }
}

}  // namespace gossamer::GOSSAMER_ISA
