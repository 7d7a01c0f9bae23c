// See adasum.h: the factors, the split of a piece of the buffer into parts of vectors, and the choice among the kernels,
// which cpu_*.cpp compile for each instruction set.
#include "adasum/adasum.h"

#include <algorithm>

#include "base/kernel_tables.h"

namespace gossamer::adasum {

GOSSAMER_CHOOSE_KERNELS()

namespace {

// body(v, first, numel) for every vector with elements in [begin, end); `first` counts from `begin`.
template <class Body>
void each_part(const Vectors& vectors, int64_t begin, int64_t end, Body body) {
  if (begin >= end) return;
  const int64_t* const last = vectors.offsets + vectors.count + 1;
  int64_t v = std::upper_bound(vectors.offsets, last, begin) - vectors.offsets - 1;
  for (; v < vectors.count && vectors.offsets[v] < end; ++v) {
    const int64_t from = std::max(begin, vectors.offsets[v]);
    const int64_t to = std::min(end, vectors.offsets[v + 1]);
    if (from < to) body(v, from - begin, to - from);
  }
}

template <class Byte, class Memory>
Byte* element(Memory* memory, int64_t i, Dtype dtype) {
  return static_cast<Byte*>(memory) + i * element_size(dtype);
}

}  // namespace

Sums& Sums::operator+=(const Sums& other) {
  dot += other.dot;
  a += other.a;
  b += other.b;
  return *this;
}

Factors factors(const Sums& sums) {
  // Not `>=`: a NaN norm must reach the result.
  const auto factor = [&](double norm) { return norm < kNoNorm ? 1.0 : 1.0 - sums.dot / (2.0 * norm); };
  return {factor(sums.a), factor(sums.b)};
}

void sums(Dtype dtype, const Vectors& vectors, int64_t begin, int64_t end, const void* a, const void* b,
          Sums* sums) {
  std::fill_n(sums, vectors.count, Sums{});
  const Kernels& table = kernels();
  each_part(vectors, begin, end, [&](int64_t v, int64_t first, int64_t numel) {
    sums[v] =
        table.sums(dtype, element<const char>(a, first, dtype), element<const char>(b, first, dtype), numel);
  });
}

void combine(Dtype dtype, const Vectors& vectors, int64_t begin, int64_t end, void* a, const void* b,
             const Factors* factors) {
  const Kernels& table = kernels();
  each_part(vectors, begin, end, [&](int64_t v, int64_t first, int64_t numel) {
    table.combine(dtype, element<char>(a, first, dtype), element<const char>(b, first, dtype), numel,
                  factors[v]);
  });
}

}  // namespace gossamer::adasum
