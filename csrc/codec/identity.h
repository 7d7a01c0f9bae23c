// The tensor's own bytes. Exact where the source has the tensor's type; a sum in float32 (float64) is
// rounded to it, NaN as the one quiet NaN, so that every device writes the same bytes.
// Listed in codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/layout.h"

namespace gossamer::GOSSAMER_ISA {

template <class T>
struct Identity : Stateless {
  using Tensor = T;
  using Value = Accumulate<T>;
  using Code = T;
  static constexpr int kCodeBits = 8 * sizeof(Code);
  static constexpr bool kRaw = true;
};

}  // namespace gossamer::GOSSAMER_ISA
