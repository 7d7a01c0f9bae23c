// flat.h on the CPU. Moves with scale 1 are memcpy; the others are loops that the compiler vectorises for the
// base instruction set (float16 in software: rare on a CPU). Flags: -O3 -ffp-contract=off.
#include "flat/flat.h"

#include <cstring>

#include "flat/move.h"

namespace gossamer::flat {
namespace {

using scalar::Scaled;
using scalar::Summed;
using scalar::with_element_type;

// Tensors may start at any byte: an unaligned one is staged through an aligned buffer.
template <class T>
bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(T) == 0;
}

template <class T>
void move_scaled(const Scaled<T>& scaled, const T* from, int64_t numel, T* to) {
  if (is_aligned<T>(from) && is_aligned<T>(to)) {
    if (from == to)  // a loop of its own: the compiler guards the other against overlap
      for (int64_t i = 0; i < numel; ++i) to[i] = scaled(to[i]);
    else
      for (int64_t i = 0; i < numel; ++i) to[i] = scaled(from[i]);
    return;
  }
  constexpr int64_t kStage = 512;
  T stage[kStage];
  for (int64_t done = 0; done < numel; done += kStage) {
    const int64_t n = numel - done < kStage ? numel - done : kStage;
    const auto offset = done * static_cast<int64_t>(sizeof(T));
    memcpy(stage, reinterpret_cast<const char*>(from) + offset, n * sizeof(T));
    for (int64_t i = 0; i < n; ++i) stage[i] = scaled(stage[i]);
    memcpy(reinterpret_cast<char*>(to) + offset, stage, n * sizeof(T));
  }
}

// `to` and `from` are the same memory or do not overlap.
template <class T>
void move(double scale, const void* from, int64_t numel, void* to) {
  if (numel <= 0) return;
  if (scale == 1.0) {
    if (from != to) memcpy(to, from, numel * sizeof(T));
    return;
  }
  using Factor = typename Scaled<T>::Lane::F;
  const Scaled<T> scaled{static_cast<Factor>(scale)};
  move_scaled(scaled, static_cast<const T*>(from), numel, static_cast<T*>(to));
}

// A tile at a time, so that the sums stay in L1 while row after row is added.
template <class T>
void sum_rows_of(const RowSum& sum, typename Summed<T>::Sum scale) {
  constexpr int64_t kTile = 2048;
  typename Summed<T>::Sum sums[kTile];
  for (int64_t begin = 0; begin < sum.numel; begin += kTile) {
    const int64_t n = sum.numel - begin < kTile ? sum.numel - begin : kTile;
    memset(sums, 0, n * sizeof(*sums));
    for (int64_t r = 0; r < sum.count; ++r) {
      const T* row = static_cast<const T*>(sum.rows[r]) + begin;
      for (int64_t i = 0; i < n; ++i) Summed<T>::add(sums[i], row[i]);
    }
    T* first = static_cast<T*>(sum.outs[0]) + begin;
    for (int64_t i = 0; i < n; ++i) first[i] = Summed<T>::finish(sums[i], scale);
    for (int64_t r = 1; r < sum.out_count; ++r)
      memcpy(static_cast<T*>(sum.outs[r]) + begin, first, n * sizeof(T));
  }
}

}  // namespace

void gather(Dtype dtype, const Segment* segments, int64_t count, void* flat, double scale) {
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    for (const Segment* s = segments; s != segments + count; ++s) {
      char* to = static_cast<char*>(flat) + s->offset * static_cast<int64_t>(sizeof(T));
      if (s->tensor != nullptr)
        move<T>(scale, s->tensor, s->numel, to);
      else if (s->numel > 0)
        memset(to, 0, s->numel * sizeof(T));
    }
  });
}

void scatter(Dtype dtype, const Segment* segments, int64_t count, const void* flat, double scale) {
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    for (const Segment* s = segments; s != segments + count; ++s) {
      const char* from = static_cast<const char*>(flat) + s->offset * static_cast<int64_t>(sizeof(T));
      if (s->tensor != nullptr) move<T>(scale, from, s->numel, s->tensor);
    }
  });
}

void scale(Dtype dtype, void* flat, int64_t numel, double scale) {
  with_element_type(dtype, [&](auto element) { move<decltype(element)>(scale, flat, numel, flat); });
}

void sum_rows(Dtype dtype, const RowSum& sum, double scale) {
  if (sum.out_count == 0) return;
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    sum_rows_of<T>(sum, static_cast<typename Summed<T>::Sum>(scale));
  });
}

}  // namespace gossamer::flat
