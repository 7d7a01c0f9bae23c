// What the codec headers share: a row is [header][codes][padding]; and what a codec must provide. Included by the codec
// headers only. The drivers (cpu_driver.inl, cuda_kernels.cuh) know codecs through these members alone.
//
// A codec is a struct template over the tensor's element type T with
//   Tensor, Value      T, and the type its values pass through (float; double keeps float64)
//   Code, kCodeBits    one element's code, and its bits on the wire: those of Code, or 4, 2 or 1, lowest first
//   kAlign             the row's codes are padded to this many bytes
//   kEntryBytes        what `write` fills for each group, from the start of the header
//   kStatistics        what one set of Params covers: nothing, a block, a row
//   kBlockMultiple     a block must be a multiple of it, where there are blocks
//   kStochastic        rounds by random numbers if the call has a key
//   kRoundsFirst       values are rounded to T before anything else looks at them
//   kRaw               codes are the bytes of T: equal types are copied
//   header_bytes       of one row
//   Stats, observe, collapse, merge, finish    values -> Params, in any order, with one result
//   kSummed            instead: `finish` takes the Sum of the `summand`s, added in the order below
//   write, read        Params <-> header
//   is_blank           every code of the group is zero; quantise is not called
//   quantise, dequantise      values <-> codes; quantise returns the lane's I, or its Bytes where codes have 4 bits
//   addend                    where codes have fewer than 8 bits: code i of a word of them, for a device's sums of rows. As
//                             dequantise, but for the signs of zero and NaN, which such a sum does not show
// With kStochastic, finish gets whether the call rounds stochastically, and a second quantise takes a random number in
// (0, 1) as well.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/lanes.h"

namespace gossamer::GOSSAMER_ISA {

enum class Statistics { none, block, row };

template <class T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

HD int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }
HD int64_t round_up(int64_t x, int64_t multiple) { return ceil_div(x, multiple) * multiple; }

// The order of a sum, so that every device gets the same bits. Partial sum p, in float64, adds the elements p, p + 128,
// p + 256, ... of the group, in that order. Then, for w = 64, 32, ..., 1, sum p adds sum p + w for all p < w. The result is
// sum 0.
constexpr int kPartialSums = 128;
struct Sum {
  double value;
  int64_t count;
};

// Elements that share one set of Params. Without statistics the row is one group.
template <class Codec>
HD int64_t group_numel(int64_t row_numel, int64_t block) {
  return Codec::kStatistics == Statistics::block && block < row_numel ? block : row_numel;
}

// Bytes of the first `count` codes. A byte shared with later codes counts as a whole.
template <class Codec>
HD int64_t code_bytes(int64_t count) {
  return ceil_div(count * Codec::kCodeBits, 8);
}

template <class Codec>
HD int64_t bytes_of_row(int64_t row_numel, int64_t block) {
  if (row_numel == 0) return 0;
  return Codec::header_bytes(row_numel, block) + round_up(code_bytes<Codec>(row_numel), Codec::kAlign);
}

// The base of codecs without statistics.
struct Stateless {
  static constexpr Statistics kStatistics = Statistics::none;
  static constexpr int64_t kBlockMultiple = 1;
  static constexpr bool kSummed = false;
  static constexpr bool kStochastic = false;
  static constexpr bool kRoundsFirst = false;
  static constexpr int64_t kAlign = 16;
  static constexpr int64_t kEntryBytes = 0;

  template <class Lane>
  struct Stats {};
  struct Params {};

  static HD int64_t header_bytes(int64_t, int64_t) { return 0; }
  template <class Lane>
  static HD Stats<Lane> nothing() {
    return {};
  }
  template <class Lane>
  static HD Stats<Lane> observe(Stats<Lane>, typename Lane::F) {
    return {};
  }
  template <class Lane>
  static HD Stats<Scalar> collapse(Stats<Lane>) {
    return {};
  }
  static HD Stats<Scalar> merge(Stats<Scalar>, Stats<Scalar>) { return {}; }
  static HD Params finish(Stats<Scalar>) { return {}; }
  static HD void write(Params, uint8_t*, int64_t) {}
  static HD Params read(const uint8_t*, int64_t) { return {}; }
  static HD bool is_blank(Params) { return false; }
  template <class Lane>
  static HD typename Lane::F quantise(Params, typename Lane::F x) {
    return x;
  }
  template <class Lane>
  static HD typename Lane::F dequantise(Params, typename Lane::F x) {
    return x;
  }
};

// The base of codecs whose header is an array of Entry, one for each block.
template <class Entry>
struct Blocks {
  static constexpr Statistics kStatistics = Statistics::block;
  static constexpr bool kRoundsFirst = false;
  static constexpr bool kRaw = false;
  static constexpr int64_t kAlign = 16;
  static constexpr int64_t kEntryBytes = sizeof(Entry);

  static HD int64_t header_bytes(int64_t row_numel, int64_t block) {
    return round_up(ceil_div(row_numel, block) * kEntryBytes, 16);
  }
};

// Scales that are bfloat16 values, one for each block.
struct BfloatScales : Blocks<uint16_t> {
 protected:
  static HD void write_scale(float scale, uint8_t* row, int64_t group) {
    reinterpret_cast<uint16_t*>(row)[group] = static_cast<uint16_t>(bit_cast<uint32_t>(scale) >> 16);
  }
  static HD float read_scale(const uint8_t* row, int64_t group) {
    return bit_cast<float>(uint32_t{reinterpret_cast<const uint16_t*>(row)[group]} << 16);
  }
};

// Statistics that are the extremes, as ordered integers: Inf and NaN lie outside the finite values on either side.
struct Extremes {
  template <class Lane>
  struct Stats {
    typename Lane::I low, high;
  };
  template <class Lane>
  static HD Stats<Lane> nothing() {
    return {Lane::set(INT32_MAX), Lane::set(INT32_MIN)};
  }
  template <class Lane>
  static HD Stats<Lane> observe(Stats<Lane> stats, typename Lane::F x) {
    const typename Lane::I key = Lane::ordered(x);
    return {Lane::min_int(stats.low, key), Lane::max_int(stats.high, key)};
  }
  template <class Lane>
  static HD Stats<Scalar> collapse(Stats<Lane> stats) {
    return {Lane::reduce_min(stats.low), Lane::reduce_max(stats.high)};
  }
  static HD Stats<Scalar> merge(Stats<Scalar> x, Stats<Scalar> y) {
    return {Scalar::min_int(x.low, y.low), Scalar::max_int(x.high, y.high)};
  }

 protected:
  static HD bool is_finite(Stats<Scalar> stats) {
    return stats.high < Scalar::ordered(bit_cast<float>(kInfinityBits)) &&
           stats.low > Scalar::ordered(-bit_cast<float>(kInfinityBits));
  }
  static HD float of_key(int32_t key) { return bit_cast<float>(Scalar::ordered(bit_cast<float>(key))); }
};

}  // namespace gossamer::GOSSAMER_ISA
