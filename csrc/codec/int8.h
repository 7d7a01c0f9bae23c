// Symmetric int8 with the largest magnitude of each block, `peak`, as bfloat16: x ~ code * (peak / 127), |error| <=
// peak / 254. Row: [peaks, padded to 16 bytes][codes, padded to 16 bytes]. A block that holds Inf or NaN decodes to
// NaN in all its elements and touches no other block. Listed in codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/layout.h"

namespace gossamer::GOSSAMER_ISA {

template <class T>
struct Int8 : BfloatScales {
  using Tensor = T;
  using Value = float;
  using Code = int8_t;
  static constexpr int kCodeBits = 8;
  static constexpr int64_t kBlockMultiple = 32;
  static constexpr bool kSummed = false;
  static constexpr bool kStochastic = true;

  // Magnitudes as integers: they are ordered as |x| is, with Inf and NaN on top.
  template <class Lane>
  struct Stats {
    typename Lane::I absmax;
  };
  template <class Lane>
  static HD Stats<Lane> nothing() {
    return {Lane::set(0)};
  }
  template <class Lane>
  static HD Stats<Lane> observe(Stats<Lane> stats, typename Lane::F x) {
    return {Lane::max_int(stats.absmax, Lane::magnitude(x))};
  }
  template <class Lane>
  static HD Stats<Scalar> collapse(Stats<Lane> stats) {
    return {Lane::reduce_max(stats.absmax)};
  }
  static HD Stats<Scalar> merge(Stats<Scalar> x, Stats<Scalar> y) {
    return {Scalar::max_int(x.absmax, y.absmax)};
  }

  // code = rint((x * lift) * inverse). lift is a power of two that keeps 127 / peak finite and normal for blocks of tiny
  // values, denormals included. It is 1 for ordinary blocks.
  struct Params {
    float peak, scale, lift, inverse;
  };
  // A peak rounded to nearest lies at most 1/256 below the largest magnitude, whose code stays below 127.5. The peak is
  // rounded up in two cases: among denormals, where that bound does not hold; and for stochastic rounding, where clamping
  // a value above 127 would shift the mean. The largest bfloat16 keeps a peak near the largest float32 finite.
  static HD Params finish(Stats<Scalar> stats, bool stochastic) {
    constexpr float two_to_100 = 1267650600228229401496703205376.0f;
    constexpr uint32_t smallest_normal = 0x00800000, largest = 0x7f7f;
    const auto bits = static_cast<uint32_t>(stats.absmax);
    if (bits >= kInfinityBits) return {bit_cast<float>(kNanBits), 0.0f, 1.0f, 0.0f};
    if (bits == 0) return {0.0f, 0.0f, 1.0f, 0.0f};
    const uint32_t rounded =
        stochastic || bits < smallest_normal ? (bits + 0xffff) >> 16 : bfloat_from_bits(bits);
    const float peak = bit_cast<float>((rounded < largest ? rounded : largest) << 16);
    const float lift = peak < 1.0f / two_to_100 ? two_to_100 : 1.0f;
    return {peak, 0.0f, lift, 127.0f / (peak * lift)};
  }
  static HD void write(Params params, uint8_t* row, int64_t group) { write_scale(params.peak, row, group); }
  static HD Params read(const uint8_t* row, int64_t group) {
    const float peak = read_scale(row, group);
    return {peak, peak * (1.0f / 127.0f), 0.0f, 0.0f};
  }
  static HD bool is_blank(Params params) { return params.inverse == 0.0f; }

  template <class Lane>
  static HD typename Lane::I quantise(Params params, typename Lane::F x) {
    return Lane::to_int(Lane::mul(Lane::mul(x, params.lift), params.inverse));
  }
  // The rounding of `inverse` may lift the largest magnitude a little above 127, so the result is clamped.
  template <class Lane>
  static HD typename Lane::I quantise(Params params, typename Lane::F x, typename Lane::F drawn) {
    const typename Lane::F v = Lane::mul(Lane::mul(x, params.lift), params.inverse);
    const typename Lane::F u = Lane::sub(drawn, 1.0f);
    return Lane::to_int(Lane::min(Lane::max(Lane::floor(Lane::add(v, u)), -127.0f), 127.0f));
  }
  template <class Lane>
  static HD typename Lane::F dequantise(Params params, typename Lane::I code) {
    return Lane::mul(Lane::to_float(code), params.scale);
  }
};

}  // namespace gossamer::GOSSAMER_ISA
