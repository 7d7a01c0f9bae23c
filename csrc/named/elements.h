// Element types as the negotiation and the batch runner need them: torch's names for them, what a backend can reduce, and
// multiplication by Horovod's rules. Used by batch_*.cpp and collectives.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "negotiate/request.h"

namespace gossamer::named {

std::string dtype_name(at::ScalarType type);       // "float32"
at::ScalarType dtype_of(const std::string& name);  // throws Error(comm): it came from another rank

// Why no backend reduces it so; empty if one can, perhaps in another type's clothes.
std::string reduction_complaint(at::ScalarType type, negotiate::Aggregate op);

// x, dense and contiguous, as bytes in one dimension; the same memory.
at::Tensor as_bytes(const at::Tensor& x);

// Of a batch with this element type on this device: on CUDA a factor for float16 is rounded to it first.
double effective_factor(double factor, at::ScalarType type, const at::Device& device);

// x *= factor, in place; contiguous.
void scale(const at::Tensor& x, double factor);

}  // namespace gossamer::named
