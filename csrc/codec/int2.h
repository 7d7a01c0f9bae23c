// Two bits an element and Int8's peak for each block: x ~ -13/16, -1/4, 1/4 or 13/16 times the peak, whichever is nearest.
// Levels that come from the largest magnitude reach the outliers at once. With levels of the mean magnitude, whose error in
// one call is smaller, fed-back errors of outliers would grow for many steps. A zero has the sign +. Row: [peaks, padded to 16 bytes][codes 0 to 3 in the order of the levels, lowest bits first, padded to 16 bytes].
// A block that holds Inf or NaN decodes to NaN and touches no other. Listed in codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/int8.h"

namespace gossamer::GOSSAMER_ISA {

template <class T>
struct Int2 : Int8<T> {
  using Code = uint8_t;
  static constexpr int kCodeBits = 2;
  static constexpr bool kStochastic = false;
  static constexpr float kSmall = 0.25f, kLarge = 0.8125f;

  struct Params {
    float peak;
  };
  static HD Params finish(typename Int8<T>::template Stats<Scalar> stats) {
    return {Int8<T>::finish(stats, false).peak};
  }
  static HD void write(Params params, uint8_t* row, int64_t group) {
    Int8<T>::write_scale(params.peak, row, group);
  }
  static HD Params read(const uint8_t* row, int64_t group) { return {Int8<T>::read_scale(row, group)}; }
  static HD bool is_blank(Params params) { return !(params.peak > 0.0f); }

  // The + 0 turns a negative zero into a zero.
  template <class Lane>
  static HD typename Lane::I quantise(Params params, typename Lane::F x) {
    const typename Lane::F small = Lane::less(Lane::magnitude_of(x), (kSmall + kLarge) / 2 * params.peak);
    const typename Lane::F place = Lane::add(Lane::mul(small, -1.0f), 1.5f);
    return Lane::to_int(Lane::add(Lane::with_sign(place, Lane::add(x, 0.0f)), 1.5f));
  }
  // The last + 0: the lowest level of a peak of zero would otherwise be a negative zero.
  template <class Lane>
  static HD typename Lane::F dequantise(Params params, typename Lane::I code) {
    const typename Lane::F place = Lane::sub(Lane::to_float(code), 1.5f);
    const typename Lane::F level =
        Lane::add(Lane::mul(Lane::magnitude_of(place), kLarge - kSmall), (3 * kSmall - kLarge) / 2);
    return Lane::add(Lane::mul(Lane::with_sign(level, place), params.peak), 0.0f);
  }
  static HD float addend(Params params, uint32_t codes, int i) {
    const float small = params.peak * kSmall, large = params.peak * kLarge;
    const bool is_small = (codes ^ codes >> 1) >> 2 * i & 1;  // codes 1 and 2
    return bit_cast<float>(bit_cast<uint32_t>(is_small ? small : large) ^
                           (~codes << (30 - 2 * i) & 0x80000000u));
  }
};

}  // namespace gossamer::GOSSAMER_ISA
