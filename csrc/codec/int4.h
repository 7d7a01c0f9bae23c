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
struct Int4 : BfloatScales {
  using Tensor = T;
  using Value = float;
  using Code = uint8_t;
  static constexpr int kCodeBits = 4;
  static constexpr int64_t kBlockMultiple = 32;
  static constexpr bool kSummed = false;
  static constexpr bool kStochastic = true;

  // Bits of x, rotated so that the sign is the lowest, and turned so that they are ordered as |x| is, with Inf and then NaN
  // on top. Of two elements of equal magnitude the positive one is the larger.
  template <class Lane>
  struct Stats {
    typename Lane::I extreme;
  };
  template <class Lane>
  static HD Stats<Lane> nothing() {
    return {Lane::set(kTurn)};
  }
  template <class Lane>
  static HD Stats<Lane> observe(Stats<Lane> stats, typename Lane::F x) {
    return {Lane::max_int(stats.extreme, Lane::rotated(x, kTurn))};
  }
  template <class Lane>
  static HD Stats<Scalar> collapse(Stats<Lane> stats) {
    return {Lane::reduce_max(stats.extreme)};
  }
  static HD Stats<Scalar> merge(Stats<Scalar> x, Stats<Scalar> y) {
    return {Scalar::max_int(x.extreme, y.extreme)};
  }

  // v = (x * lift) * inverse counts in scales. lift is a power of two that keeps 1 / scale finite.
  struct Params {
    float scale, lift, inverse;
  };
  // Stochastic rounding must not clamp, because clamping would shift its mean. So the largest magnitude then takes level -91,
  // on either side, and the scale is rounded away from zero.
  static HD Params finish(Stats<Scalar> stats, bool stochastic) {
    constexpr float two_to_100 = 1267650600228229401496703205376.0f;
    const auto rotated = static_cast<uint32_t>(stats.extreme ^ kTurn);
    const uint32_t magnitude = rotated >> 1, sign = ~rotated << 31;  // the scale's
    if (magnitude >= kInfinityBits) return {bit_cast<float>(kNanBits), 1.0f, 0.0f};
    const auto bits = bit_cast<uint32_t>(bit_cast<float>(magnitude) / (stochastic ? 91.0f : 112.0f));
    const uint32_t rounded = (stochastic ? (bits + 0xffff) >> 16 : bfloat_from_bits(bits)) << 16;
    if (rounded == 0) return {0.0f, 1.0f, 0.0f};
    const float lift = rounded < bit_cast<uint32_t>(1.0f / two_to_100) ? two_to_100 : 1.0f;
    const float scale = bit_cast<float>(rounded | sign);
    return {scale, lift, 1.0f / (scale * lift)};
  }
  static HD void write(Params params, uint8_t* row, int64_t group) { write_scale(params.scale, row, group); }
  static HD Params read(const uint8_t* row, int64_t group) { return {read_scale(row, group), 0.0f, 0.0f}; }
  static HD bool is_blank(Params params) { return params.inverse == 0.0f; }

  template <class Lane>
  static HD typename Lane::Bytes quantise(Params params, typename Lane::F x) {
    return nearest<Lane>(Lane::mul(Lane::mul(x, params.lift), params.inverse));
  }

  // One of the two levels around |v|: the upper with the probability that makes the mean |v|. `drawn` is 1 + u, where u lies in
  // (0, 1). Level j is (j + 3)^2 - 9. |v| goes to the next one if it lies more than u times the gap, 2 j + 7, above level j.
  // Level 7, which is 91, is the last one, also where a denormal scale is too small and |v| above it.
  template <class Lane>
  static HD typename Lane::Bytes quantise(Params params, typename Lane::F x, typename Lane::F drawn) {
    using F = typename Lane::F;
    const F v = Lane::mul(Lane::mul(x, params.lift), params.inverse);
    const F magnitude = Lane::magnitude_of(v), square = Lane::add(magnitude, 9.0f);
    if constexpr (Lane::kLooksUp) {
      // In each half of an octave lies at most one (j + 3)^2. So a table gives the least j of the half, and two comparisons say
      // whether |v| goes one or two levels up: that of |v| - level with u gap, and that of |v| - next level with u next gap,
      // to both sides of which 2 is added. All of it is exact where it decides. 127 is for no second level.
      const F gap = Lane::template floats_of_half<7, 7, 9, 9, 11, 13, 17, 19>(square);
      const F level = Lane::template floats_of_half<0, 0, 7, 7, 16, 27, 55, 72>(square);
      const F next_level_less_2 = Lane::template floats_of_half<5, 5, 14, 14, 25, 38, 70, 127>(square);
      const F share = Lane::exact_mul_sub(drawn, gap, gap), next_share = Lane::add_twice(share, drawn);
      typename Lane::I count = Lane::template ints_of_half<0, 0, 1, 1, 2, 3, 5, 6>(square);
      count = Lane::count_less(share, Lane::sub(magnitude, level), count);
      count = Lane::count_less(next_share, Lane::sub(magnitude, next_level_less_2), count);
      return Lane::template bytes_above<8>(Lane::with_sign(count, v));
    } else {
      const F j = Lane::min(Lane::floor(Lane::sub(Lane::sqrt(square), 3.0f)), 6.0f),
              u = Lane::sub(drawn, 1.0f);
      const F level = Lane::mul(j, Lane::add(j, 6.0f)), gap = Lane::add(Lane::add(j, j), 7.0f);
      const F up = Lane::less(Lane::mul(u, gap), Lane::sub(magnitude, level));
      return nearest<Lane>(Lane::with_sign(Lane::add(level, Lane::mul(up, gap)), v));
    }
  }

  // The + 0: level 0 of a negative scale would otherwise be a negative zero.
  template <class Lane>
  static HD typename Lane::F dequantise(Params params, typename Lane::I code) {
    const typename Lane::F k = Lane::sub(Lane::to_float(code), 8.0f);
    const typename Lane::F level = Lane::mul(k, Lane::add(Lane::magnitude_of(k), 6.0f));
    return Lane::add(Lane::mul(level, params.scale), 0.0f);
  }

  static HD float addend(Params params, uint32_t codes, int i) {
    constexpr float bias = 8388608.0f + 128.0f;
    return (bit_cast<float>(biased_level(codes, i)) - bias) * params.scale;
  }

 private:
  static constexpr int32_t kTurn = INT32_MIN + 1;

  // The bits of 2^23 + 128 + level, whose lowest byte counts in whole numbers. Four codes at a time are looked up in two tables
  // of eight bytes, of which their highest bits choose one.
  static HD uint32_t biased_level(uint32_t codes, int i) {
    constexpr uint32_t two_to_23 = 0x4b000000;
    const uint32_t four = codes >> i / 4 * 16;
    const uint32_t low = permuted(0x49382510u, 0x79706558u, four & 0x7777);
    const uint32_t high = permuted(0x9b908780u, 0xdbc8b7a8u, four & 0x7777);
    const uint32_t levels = permuted(low, high, (four >> 1 & 0x4444) | 0x3210);
    return permuted(levels, two_to_23, 0x7440 | i % 4);
  }

  // The code of the nearest level. Midway between two levels lies 3.5, 11.5, 21.5 and so on, so that the nearest whole number,
  // where a half goes to the even one, decides as v itself does. Vectors count the steps that it reaches. A single lane solves
  // for them: step j is j (j + 5) - 2, so the whole number d reaches floor((sqrt(4 d + 33) - 5) / 2). With 35 for 33 no d
  // comes near the edge of a step, and a root that is not exact will do. A denormal scale may be a third too small, and v then
  // beyond the last level.
  template <class Lane>
  static HD typename Lane::Bytes nearest(typename Lane::F v) {
    if constexpr (std::is_same_v<Lane, Scalar>) {
      const float whole = (v + 12582912.0f) - 12582912.0f;
      const float root = Lane::near_sqrt(Lane::exact_mul_add(Lane::magnitude_of(whole), 4.0f, 35.0f));
      const int32_t count =
          bit_cast<int32_t>(Lane::exact_mul_add(root, 0.5f, 12582909.0f)) - bit_cast<int32_t>(12582912.0f);
      const int32_t code = whole < 0 ? 8 - count : 8 + count;
      return Lane::max_int(0, Lane::min_int(code, 15));
    } else {
      return Lane::template by_steps<8, 15, 4, 12, 22, 34, 48, 64, 82, 102>(Lane::to_int(v));
    }
  }
};

}  // namespace gossamer::GOSSAMER_ISA
