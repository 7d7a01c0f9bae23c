// The arithmetic of flat memory, shared by flat.cpp, flat_cuda.cu and sum_cuda.cu: one element times `scale`, and the
// sum of one element over rows, computed in the accumulate dtype. Not included elsewhere.
#pragma once

#include <type_traits>

#include "base/element_type.h"
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

}  // namespace gossamer::GOSSAMER_ISA
