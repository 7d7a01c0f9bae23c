// Four bits an element and one bfloat16 scale a block: x ~ level(code) * scale. The 16 levels k (6 + |k|), k = -8 ... 7,
// lie closer together near zero, where most values of a gradient are. At 4.5 bits this gives three quarters of the error
// of evenly spaced levels for heavy tails, and no more error for normal values.
// The element of largest magnitude takes level -112, so the scale has the opposite sign. Row: [scales, padded
// to 16 bytes][codes k + 8, low half of a byte first, padded to 16 bytes]. A block that holds Inf or NaN decodes
// to NaN and touches no other. Listed in codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/layout.h"

namespace gossamer::GOSSAMER_ISA {

template <class T>
struct Int4 : BfloatScales, Extremes {
  using Tensor = T;
  using Value = float;
  using Code = uint8_t;
  static constexpr int kCodeBits = 4;
  static constexpr int64_t kBlockMultiple = 32;
  static constexpr bool kSummed = false;
  static constexpr bool kStochastic = true;

  // v = (x * lift) * inverse counts in scales. lift is a power of two that keeps 1 / scale finite.
  struct Params {
    float scale, lift, inverse;
  };
  // Of two extremes of equal magnitude the positive one counts. Stochastic rounding must not clamp, because clamping would
  // shift its mean. So the largest magnitude then takes level -91, on either side, and the scale is rounded away from zero.
  static HD Params finish(Stats<Scalar> stats, bool stochastic) {
    constexpr float two_to_100 = 1267650600228229401496703205376.0f;
    if (!is_finite(stats)) return {bit_cast<float>(kNanBits), 1.0f, 0.0f};
    const float high = of_key(stats.high), low = of_key(stats.low);
    const float extreme = high >= -low ? high : low;
    const uint32_t bits = bit_cast<uint32_t>(extreme / (stochastic ? -91.0f : -112.0f));
    const uint32_t rounded = stochastic ? (bits + 0xffff) >> 16 : bfloat_from_bits(bits);
    const float scale = bit_cast<float>(rounded << 16);
    if (scale == 0.0f) return {0.0f, 1.0f, 0.0f};
    const float lift = scale < 1.0f / two_to_100 && scale > -1.0f / two_to_100 ? two_to_100 : 1.0f;
    return {scale, lift, 1.0f / (scale * lift)};
  }
  static HD void write(Params params, uint8_t* row, int64_t group) { write_scale(params.scale, row, group); }
  static HD Params read(const uint8_t* row, int64_t group) { return {read_scale(row, group), 0.0f, 0.0f}; }
  static HD bool is_blank(Params params) { return params.inverse == 0.0f; }

  // The nearest level. Midway between levels j and j + 1, sqrt(|v| + 9 - 1/4) - 3 is j + 1/2.
  template <class Lane>
  static HD typename Lane::I quantise(Params params, typename Lane::F x) {
    const typename Lane::F v = Lane::mul(Lane::mul(x, params.lift), params.inverse);
    const typename Lane::F root = Lane::sqrt(Lane::add(Lane::magnitude_of(v), 8.75f));
    return code_of<Lane>(Lane::rint(Lane::sub(root, 3.0f)), v);
  }

  // One of the two levels around |v|: the upper with the probability that makes the mean |v|. `u` lies in (0, 1).
  template <class Lane>
  static HD typename Lane::I quantise(Params params, typename Lane::F x, typename Lane::F u) {
    const typename Lane::F v = Lane::mul(Lane::mul(x, params.lift), params.inverse);
    const typename Lane::F magnitude = Lane::magnitude_of(v);
    const typename Lane::F j = Lane::floor(Lane::sub(Lane::sqrt(Lane::add(magnitude, 9.0f)), 3.0f));
    const typename Lane::F rest = Lane::sub(magnitude, Lane::mul(j, Lane::add(j, 6.0f)));
    const typename Lane::F gap = Lane::add(Lane::add(j, j), 7.0f);
    return code_of<Lane>(Lane::add(j, Lane::less(Lane::mul(u, gap), rest)), v);
  }

  // The + 0: level 0 of a negative scale would otherwise be a negative zero.
  template <class Lane>
  static HD typename Lane::F dequantise(Params params, typename Lane::I code) {
    const typename Lane::F k = Lane::sub(Lane::to_float(code), 8.0f);
    const typename Lane::F level = Lane::mul(k, Lane::add(Lane::magnitude_of(k), 6.0f));
    return Lane::add(Lane::mul(level, params.scale), 0.0f);
  }

 private:
  template <class Lane>
  static HD typename Lane::I code_of(typename Lane::F magnitude, typename Lane::F sign) {
    const typename Lane::F code = Lane::add(Lane::with_sign(magnitude, sign), 8.0f);
    return Lane::to_int(Lane::min(Lane::max(code, 0.0f), 15.0f));
  }
};

}  // namespace gossamer::GOSSAMER_ISA
