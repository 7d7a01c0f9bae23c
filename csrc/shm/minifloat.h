// Floats of 8 and 16 bits, by integer arithmetic without branches, so that loops over it are vectorised. Rounds to nearest
// even; overflow gives what torch 2.13 gives. float16 and bfloat16 use it only where the lane type has no instructions for
// them. Called by strip.h.
#pragma once

#include <cstdint>

#include "base/lanes.h"

namespace gossamer::GOSSAMER_ISA {

// `condition ? yes : no` without a branch: GCC moves float arithmetic into branches and cannot vectorise it.
HD uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// The meaning of the codes beyond the largest finite number.
enum class Specials {
  ieee,  // Inf, then NaN; overflow gives Inf
  fn,  // no Inf, NaN has all bits set; overflow gives the largest finite number (torch before 2.13: that NaN)
  fnuz,  // no Inf, no -0: its code is the only NaN, and what overflow gives
};

template <int exponent_bits, int mantissa_bits, int bias, Specials specials>
struct Minifloat {
  static constexpr int kBits = 1 + exponent_bits + mantissa_bits;
  static constexpr int kShift = 23 - mantissa_bits;
  static constexpr uint32_t kMagnitude = (1u << (kBits - 1)) - 1;
  static constexpr uint32_t kSign = kMagnitude + 1;
  static constexpr uint32_t kInfinity = ((1u << exponent_bits) - 1) << mantissa_bits;  // ieee
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - bias) << 23;
  static constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);  // as a float's bits
  static constexpr uint32_t kOverflow = specials == Specials::ieee ? kInfinity
                                        : specials == Specials::fn ? kMagnitude - 1
                                                                   : kSign;
  static constexpr uint32_t kNan = specials == Specials::ieee ? kInfinity + (1u << (mantissa_bits - 1))
                                   : specials == Specials::fn ? kMagnitude
                                                              : kSign;

  static HD float decode(uint32_t code) {
    const uint32_t magnitude = code & kMagnitude;
    const uint32_t shifted = magnitude << kShift;
    uint32_t bits = shifted + kRebias;
    // A denormal: one exponent up; the float subtraction removes the leading one that a denormal does not have.
    const float denormal = bit_cast<float>(bits + (1u << 23)) - bit_cast<float>(kSmallestNormal);
    bits = select(magnitude < (1u << mantissa_bits), bit_cast<uint32_t>(denormal), bits);
    if constexpr (specials == Specials::ieee) {
      constexpr uint32_t rest = (255u - kRebias / (1u << 23) - ((1u << exponent_bits) - 1)) << 23;
      bits += select(magnitude >= kInfinity, rest, 0);
      bits |= select(magnitude > kInfinity, 1u << 22, 0);  // quiet, as vcvtph2ps makes it
    } else {
      const bool is_nan = specials == Specials::fn ? magnitude == kMagnitude : code == kSign;
      bits = select(is_nan, kNanBits, bits);
      if constexpr (specials == Specials::fnuz) code = select(is_nan, 0, code);
    }
    return bit_cast<float>(bits | (code & kSign) << (32 - kBits));
  }

  // The sign of a NaN is dropped.
  static HD uint32_t encode(float x) {
    const uint32_t all = bit_cast<uint32_t>(x);
    uint32_t sign = all & 0x80000000u;
    const uint32_t bits = all ^ sign;
    const uint32_t rounded =
        (bits - kRebias + ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1u)) >> kShift;
    // A denormal: let the float adder round it into place.
    constexpr uint32_t magic = static_cast<uint32_t>(151 - bias - mantissa_bits) << 23;
    const uint32_t denormal = bit_cast<uint32_t>(bit_cast<float>(bits) + bit_cast<float>(magic)) - magic;
    uint32_t code = select(bits < kSmallestNormal, denormal, rounded);
    code = select(code >= kOverflow, kOverflow, code);
    if constexpr (specials == Specials::fnuz) sign = select(code == 0, 0, sign);
    code = code | (sign >> (32 - kBits));
    return select(bits > kInfinityBits, kNan, code);
  }
};

using Float16 = Minifloat<5, 10, 15, Specials::ieee>;
using Float8E4m3fn = Minifloat<4, 3, 7, Specials::fn>;
using Float8E4m3fnuz = Minifloat<4, 3, 8, Specials::fnuz>;
using Float8E5m2 = Minifloat<5, 2, 15, Specials::ieee>;
using Float8E5m2fnuz = Minifloat<5, 2, 16, Specials::fnuz>;

struct Bfloat16 {
  static HD float decode(uint32_t code) { return bit_cast<float>(code << 16); }
  static HD uint32_t encode(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return select((bits & 0x7fffffffu) > kInfinityBits, kNanBits >> 16, rounded);
  }
};

}  // namespace gossamer::GOSSAMER_ISA
