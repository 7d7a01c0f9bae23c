// From a Dtype to the C++ type of an element. Included by flat/ and by codec/'s CUDA files.
#pragma once

#include "base/dtype.h"
#include "base/lanes.h"

namespace gossamer::GOSSAMER_ISA {

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
