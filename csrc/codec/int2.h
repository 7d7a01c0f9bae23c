// Two bits an element and one bfloat16 scale a block, the mean of |x|: x ~ -2, -9/16, 9/16 or 2 times the scale, whichever
// is nearest. These levels are close to the best four for normal values, and give heavy tails more. A zero has the sign +.
// Row: [scales, padded to 16 bytes][codes 0 to 3 in the order of the levels, lowest bits first, padded to 16 bytes]. The mean
// is OneBit's, in its order of summation. A block that holds Inf or NaN decodes to NaN and touches no other. Listed in
// codec_list.h; the contract is in layout.h.
#pragma once

#include "codec/onebit.h"

namespace gossamer::GOSSAMER_ISA {

template <class T>
struct Int2 : OneBit<T> {
  using Params = typename OneBit<T>::Params;
  static constexpr int kCodeBits = 2;
  static constexpr float kSmall = 0.5625f, kLarge = 2.0f;

  // The half of the largest bfloat16 keeps the large level finite.
  static HD Params finish(Sum sum) {
    constexpr float largest = 169476569462576773795235400185743933440.0f;
    const Params mean = OneBit<T>::finish(sum);
    return {mean.scale > largest ? largest : mean.scale};
  }

  // The + 0 turns a negative zero into a zero.
  template <class Lane>
  static HD typename Lane::I quantise(Params params, typename Lane::F x) {
    const typename Lane::F small = Lane::less(Lane::magnitude_of(x), (kSmall + kLarge) / 2 * params.scale);
    const typename Lane::F level = Lane::add(Lane::mul(small, -1.0f), 1.5f);
    return Lane::to_int(Lane::add(Lane::with_sign(level, Lane::add(x, 0.0f)), 1.5f));
  }
  // The + 0: the lowest level of a scale of zero would otherwise be a negative zero.
  template <class Lane>
  static HD typename Lane::F dequantise(Params params, typename Lane::I code) {
    const typename Lane::F place = Lane::sub(Lane::to_float(code), 1.5f);
    const typename Lane::F level =
        Lane::add(Lane::mul(Lane::magnitude_of(place), kLarge - kSmall), (3 * kSmall - kLarge) / 2);
    return Lane::add(Lane::mul(Lane::with_sign(level, place), params.scale), 0.0f);
  }
};

}  // namespace gossamer::GOSSAMER_ISA
