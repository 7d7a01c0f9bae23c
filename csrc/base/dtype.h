// The element types of gradients, which codecs and flat memory understand. Torch-free; collectives/two_shot.cpp maps
// torch's ScalarType to them.
#pragma once

#include <cstdint>

namespace gossamer {

enum class Dtype : int { f32 = 0, f64 = 1, f16 = 2, bf16 = 3 };

constexpr int64_t element_size(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// Sums run in float32, and in float64 for float64 tensors.
constexpr Dtype accumulate_dtype(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

}  // namespace gossamer
