// Element types for the negotiation and the batch runner: torch's names of them, what a backend can reduce, and
// multiplication by Horovod's rules. Used by batch_*.cpp and collectives.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "negotiate/request.h"

namespace gossamer::named {

std::string dtype_name(at::ScalarType type);       // "float32"
at::ScalarType dtype_of(const std::string& name);  // Error(comm): another rank sent the name

// Why no backend can do this reduction; empty if one can, possibly after a conversion to another type.
std::string reduction_complaint(at::ScalarType type, negotiate::Aggregate op);

// The memory of x, which is dense and contiguous, as bytes in one dimension.
at::Tensor as_bytes(const at::Tensor& x);

// The factor for elements of this type on this device: on CUDA a factor for float16 is rounded to float16 first.
double effective_factor(double factor, at::ScalarType type, const at::Device& device);

// x *= factor, in place; contiguous.
void scale(const at::Tensor& x, double factor);

}  // namespace gossamer::named
