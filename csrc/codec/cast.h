// Sixteen bits an element: bfloat16 (the range of float32, 8 bits of precision) and IEEE half (11 bits,
// up to 65504). Round to nearest even; NaN becomes the one quiet NaN; half overflows to Inf.
// A float64 element is rounded to float32 on the way. Listed in codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/layout.h"

namespace gossamer::GOSSAMER_ISA {

template <class T>
struct CastBf16 : Stateless {
  using Tensor = T;
  using Value = float;
  using Code = Bfloat;
  static constexpr int kCodeBits = 8 * sizeof(Code);
  static constexpr bool kRaw = false;
};

template <class T>
struct CastFp16 : Stateless {
  using Tensor = T;
  using Value = float;
  using Code = Half;
  static constexpr int kCodeBits = 8 * sizeof(Code);
  static constexpr bool kRaw = false;
};

}  // namespace gossamer::GOSSAMER_ISA
