// The kernels' name for a tensor's dtype. For files with torch headers.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "base/dtype.h"

namespace gossamer {

// The kernels' type, if it is a floating-point type that flat/ and codec/ compute with.
inline std::optional<Dtype> float_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Dtype::f32;
    case at::kDouble: return Dtype::f64;
    case at::kHalf: return Dtype::f16;
    case at::kBFloat16: return Dtype::bf16;
    default: return std::nullopt;
  }
}

}  // namespace gossamer
