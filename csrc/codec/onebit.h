// One bit an element, its sign, and one bfloat16 scale a block, the mean of |x|: x ~ +-scale. A zero has the sign +.
// Row: [scales, padded to 16 bytes][signs, 1 for x < 0, lowest bit first, padded to 16 bytes]. The drivers sum the mean in
// one order (kSummed in layout.h), so its bits are equal everywhere. A block that holds Inf or NaN decodes to NaN and
// touches no other. Listed in codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/layout.h"

namespace gossamer::GOSSAMER_ISA {

template <class T>
struct OneBit : BfloatScales {
  using Tensor = T;
  using Value = float;
  using Code = uint8_t;
  static constexpr int kCodeBits = 1;
  static constexpr int64_t kBlockMultiple = kPartialSums;
  static constexpr bool kSummed = true;
  static constexpr bool kStochastic = false;

  template <class Lane>
  static HD typename Lane::F summand(typename Lane::F x) {
    return Lane::magnitude_of(x);
  }

  struct Params {
    float scale;
  };
  // A sum of finite float32 values does not overflow float64. The largest bfloat16 keeps means next to the
  // largest float32 from becoming Inf.
  static HD Params finish(Sum sum) {
    constexpr float largest = 338953138925153547590470800371487866880.0f;
    if (!(sum.value <= 1e300)) return {bit_cast<float>(kNanBits)};
    const float mean = static_cast<float>(sum.value / static_cast<double>(sum.count));
    return {Scalar::rounded(Scalar::min(mean, largest), Bfloat{})};
  }
  static HD void write(Params params, uint8_t* row, int64_t group) { write_scale(params.scale, row, group); }
  static HD Params read(const uint8_t* row, int64_t group) { return {read_scale(row, group)}; }
  static HD bool is_blank(Params params) { return !(params.scale > 0.0f); }

  template <class Lane>
  static HD typename Lane::I quantise(Params, typename Lane::F x) {
    return Lane::is_negative(x);
  }
  template <class Lane>
  static HD typename Lane::F dequantise(Params params, typename Lane::I code) {
    return Lane::mul(Lane::add(Lane::mul(Lane::to_float(code), -2.0f), 1.0f), params.scale);
  }
  static HD float addend(Params params, uint32_t codes, int i) {
    return bit_cast<float>(bit_cast<uint32_t>(params.scale) ^ (codes << (31 - i) & 0x80000000u));
  }
};

}  // namespace gossamer::GOSSAMER_ISA
