// Sixteen bits an element: bfloat16 (the range of float32, 8 bits of precision) and IEEE half (11 bits,
// up to 65504). Round to nearest even; NaN becomes the one quiet NaN; half overflows to Inf.
// A float64 element is rounded to float32 on the way. Listed in codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/layout.h"

namespace gossamer::GOSSAMER_ISA {

template <class T, class Narrow>
struct Cast : Stateless {
  using Tensor = T;
  using Value = float;
  using Code = Narrow;
  static constexpr int kCodeBits = 8 * sizeof(Code);
  static constexpr bool kRaw = false;
};

template <class T>
using CastBf16 = Cast<T, Bfloat>;
template <class T>
using CastFp16 = Cast<T, Half>;

}  // namespace gossamer::GOSSAMER_ISA
