// The bytes of one chunk's entry, and the arithmetic of its two levels, for CPU and CUDA alike.
//   2 bytes  low level, bfloat16       2 bytes  high level, bfloat16
//   `kept` indices within the chunk, ascending, index_bits each, lowest bit first, padded to a byte
//   `kept` values, 2 bits each: sign, then whether it is the high level; lowest bit first, padded to a byte
// Zeros are not sent: a slot other than the first whose index is 0 is empty, and so is every slot after it. Levels of 0
// say that the chunk is all zeros. A chunk with NaN or Inf has NaN levels and no indices: all of it decodes to NaN.
#pragma once

#include "base/lanes.h"
#include "sparse/sparse.h"

namespace gossamer::GOSSAMER_ISA {

struct Entry {
  int64_t kept, index_bytes, bytes;
  int index_bits;

  HD explicit Entry(const sparse::Format& format) : kept(format.kept), index_bits(1) {
    while (int64_t{1} << index_bits < format.chunk) ++index_bits;
    index_bytes = (kept * index_bits + 7) / 8;
    bytes = kHeader + index_bytes + (kept + 3) / 4;
  }
  static constexpr int64_t kHeader = 4;
};

// A magnitude as an integer: ordered as |x| is, with Inf and NaN on top.
HD int32_t magnitude_bits(float x) { return static_cast<int32_t>(bit_cast<uint32_t>(x) & 0x7fffffffu); }

// A value above the split is sent as the high level, another as the low one. In float64, so that no chunk needs scaling.
struct Levels {
  double low, high;

  HD double split() const { return (low + high) / 2; }
};

// The values above a split.
struct Above {
  double sum;
  int64_t count;
};

// Sums have one order: partial sum p takes the kept magnitudes p, p + 32, ... in order. Then, for w = 16, 8, ..., 1, sum p
// takes sum p + w for all p < w.
constexpr int kSumsAtOnce = 32;

// The split is the mean at first. Then each level is the mean of its side, and the split lies midway. above(split) returns
// the values above it; all are above 0. Equal values all lie on one side.
template <class SumAbove>
HD Levels levels_of(const SumAbove& above) {
  const Above all = above(0.0);
  const double mean = all.sum / static_cast<double>(all.count);
  Levels levels{mean, mean};
  for (int round = 0; round < 2; ++round) {
    const Above high = above(levels.split());
    const int64_t low_count = all.count - high.count;
    if (high.count == 0 || low_count == 0) break;
    levels.high = high.sum / static_cast<double>(high.count);
    levels.low = (all.sum - high.sum) / static_cast<double>(low_count);
  }
  return levels;
}

HD uint32_t level_bits(double level) {
  constexpr float largest = 338953138925153547590470800371487866880.0f;  // the largest bfloat16
  const float value = level < largest ? static_cast<float>(level) : largest;
  return bfloat_from_bits(bit_cast<uint32_t>(value));
}
constexpr uint32_t kNanLevel = 0x7fc0;
HD uint32_t header_of(const Levels& levels) { return level_bits(levels.low) | level_bits(levels.high) << 16; }
constexpr uint32_t kNanHeader = kNanLevel | kNanLevel << 16;

// The header's low and high level, both zero for an entry without values.
HD uint32_t read_header(const uint8_t* entry) {
  return entry[0] | static_cast<uint32_t>(entry[1]) << 8 | static_cast<uint32_t>(entry[2]) << 16 |
         static_cast<uint32_t>(entry[3]) << 24;
}
HD float low_of(uint32_t header) { return bit_cast<float>(header << 16); }
HD float high_of(uint32_t header) { return bit_cast<float>(header & 0xffff0000u); }

HD uint32_t read_index(const Entry& entry, const uint8_t* bytes, int64_t slot) {
  const uint8_t* indices = bytes + Entry::kHeader;
  const int64_t bit = slot * entry.index_bits, first = bit >> 3, last = (bit + entry.index_bits - 1) >> 3;
  uint32_t word = indices[first];
  if (last > first) word |= static_cast<uint32_t>(indices[first + 1]) << 8;
  if (last > first + 1) word |= static_cast<uint32_t>(indices[first + 2]) << 16;
  return (word >> (bit & 7)) & ((1u << entry.index_bits) - 1);
}
HD float read_value(const Entry& entry, const uint8_t* bytes, int64_t slot, float low, float high) {
  const uint32_t code = bytes[Entry::kHeader + entry.index_bytes + slot / 4] >> (slot % 4 * 2) & 3u;
  const float level = code & 2u ? high : low;
  return code & 1u ? -level : level;
}

}  // namespace gossamer::GOSSAMER_ISA
