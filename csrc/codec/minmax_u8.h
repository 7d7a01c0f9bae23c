// Bagua's MinMaxUInt8, slot for slot: a 32-byte header (min, max in the tensor's type, then zeros) and one
// byte an element padded to 32. The grid is anchored at zero, so zeros stay zeros where the row spans zero.
// One departure: codes are also clamped from below; Bagua's wrap around in rows far from zero. Inf or NaN poisons its row.
// Listed in codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/layout.h"

namespace gossamer::GOSSAMER_ISA {

template <class T>
struct MinMaxU8 : Extremes {
  using Tensor = T;
  using Value = float;
  using Code = uint8_t;
  static constexpr int kCodeBits = 8;
  static constexpr Statistics kStatistics = Statistics::row;
  static constexpr int64_t kBlockMultiple = 1;
  static constexpr bool kSummed = false;
  static constexpr bool kStochastic = false;
  static constexpr bool kRoundsFirst = true;
  static constexpr bool kRaw = false;
  static constexpr int64_t kAlign = 32;
  static constexpr int64_t kEntryBytes = 2 * sizeof(T);

  static HD int64_t header_bytes(int64_t, int64_t) { return 32; }

  struct Params {
    float min, max, scale, upper, lower;
  };
  static HD Params from_extremes(float min, float max) {
    const float scale = 255.0f / ((max - min) + 1e-7f);
    const float upper = Scalar::rint(max * scale);
    return {min, max, scale, upper, upper - 255.0f};
  }
  static HD Params finish(Stats<Scalar> stats) {
    const float nan = bit_cast<float>(kNanBits);
    if (!is_finite(stats)) return {nan, nan, nan, nan, nan};
    // + 0.0f: a negative zero is stored as zero.
    return from_extremes(of_key(stats.low) + 0.0f, of_key(stats.high) + 0.0f);
  }
  static HD void write(Params params, uint8_t* row, int64_t) {
    Scalar::store(reinterpret_cast<T*>(row), params.min);
    Scalar::store(reinterpret_cast<T*>(row) + 1, params.max);
  }
  static HD Params read(const uint8_t* row, int64_t) {
    const T* header = reinterpret_cast<const T*>(row);
    return from_extremes(Scalar::load(header), Scalar::load(header + 1));
  }
  static HD bool is_blank(Params params) { return params.scale != params.scale; }

  // max before min: max turns a NaN (a constant row above 1e29: Inf - Inf) into its zero.
  template <class Lane>
  static HD typename Lane::I quantise(Params params, typename Lane::F x) {
    const typename Lane::F level = Lane::min(Lane::rint(Lane::mul(x, params.scale)), params.upper);
    return Lane::to_int(Lane::min(Lane::max(Lane::sub(level, params.lower), 0.0f), 255.0f));
  }
  template <class Lane>
  static HD typename Lane::F dequantise(Params params, typename Lane::I code) {
    return Lane::div(Lane::add(Lane::to_float(code), params.lower), params.scale);
  }
};

}  // namespace gossamer::GOSSAMER_ISA
