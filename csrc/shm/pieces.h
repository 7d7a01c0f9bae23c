// Arithmetic for cutting buffers into the pieces of rounds. Used by the collectives of this folder.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace gossamer::shm {

// Bytes of a cache line; pieces begin on one, so that no two ranks write into it. Some ARM processors have lines of 64
// bytes, Apple's have 128.
#if defined(__aarch64__)
constexpr int64_t kLine = 128;
#else
constexpr int64_t kLine = 64;
#endif

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_down(int64_t value, int64_t multiple) { return value / multiple * multiple; }

// A part of something: [begin, begin + count).
struct Range {
  int64_t begin = 0;
  int64_t count = 0;
};

// Piece number `index` of `total` elements cut into pieces of `piece`; empty beyond the end.
constexpr Range piece_of(int64_t total, int64_t piece, int64_t index) {
  const int64_t begin = std::min(total, piece * index);
  return {begin, std::min(piece, total - begin)};
}

// Slice `index` of `count` elements cut into `slices` that begin on cache lines.
constexpr Range slice_of(int64_t count, int slices, int index, int64_t element_bytes) {
  const int64_t unit = std::max<int64_t>(1, kLine / element_bytes);
  return piece_of(count, ceil_div(ceil_div(count, slices), unit) * unit, index);
}

// Where the segment of rank `in` has its place for rank `of`: a segment has one for each rank but its own.
constexpr int place_for(int of, int in) { return of > in ? of - 1 : of; }

inline uint8_t* at(void* base, int64_t bytes) { return static_cast<uint8_t*>(base) + bytes; }
inline const uint8_t* at(const void* base, int64_t bytes) {
  return static_cast<const uint8_t*>(base) + bytes;
}

inline void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace gossamer::shm
