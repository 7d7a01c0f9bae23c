// The arithmetic of Adasum: two vectors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b. That is the sum of
// orthogonal vectors and the mean of equal ones. How vectors travel between ranks is not here: named/adasum.cpp does that
// and calls this for each piece. Torch-free.
//
// Everything is computed in float64, in an order that does not depend on the instruction set. A float32 result is rounded
// once from float64; a result of 16 bits is rounded to float32 first. A NaN is always the same NaN.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace gossamer::adasum {

// A vector with a smaller squared norm counts as zero: a quotient would be noise. The root of the smallest normal double.
constexpr double kNoNorm = 0x1p-511;

// The sums over two vectors, or over parts of them; the sums of all parts are then added.
struct Sums {
  double dot = 0;
  double a = 0, b = 0;  // squared norms

  Sums& operator+=(const Sums& other);
};

struct Factors {
  double a, b;
};

// A vector that counts as zero leaves the other as it is.
Factors factors(const Sums& sums);

// Vectors that lie one after the other in a flat buffer: vector v is its elements [offsets[v], offsets[v + 1]).
struct Vectors {
  const int64_t* offsets;  // count + 1 numbers, ascending
  int64_t count;
};

// sums[v] becomes what the elements [begin, end) of the buffer contribute to vector v, and zeros where they hold nothing of
// v. a and b hold only these elements, aligned to their type.
void sums(Dtype dtype, const Vectors& vectors, int64_t begin, int64_t end, const void* a, const void* b,
          Sums* sums);

// a[i] = factors[v].a * a[i] + factors[v].b * b[i] for the elements [begin, end) of the buffer; a and b as above, not
// overlapping. Exchanging the roles of a and b gives the same bits.
void combine(Dtype dtype, const Vectors& vectors, int64_t begin, int64_t end, void* a, const void* b,
             const Factors* factors);

struct Kernels {
  const char* name;  // "scalar", "neon", "avx2", "avx512"
  Sums (*sums)(Dtype dtype, const void* a, const void* b, int64_t numel);
  void (*combine)(Dtype dtype, void* a, const void* b, int64_t numel, const Factors& factors);
};

// The kernels for this machine, chosen once; `select_kernels` picks by name (tests, benchmarks) and returns false if
// this CPU or build lacks them.
const Kernels& kernels();
bool select_kernels(const char* name);
const Kernels* kernels_by_name(const char* name);  // nullptr if this CPU or build lacks them

}  // namespace gossamer::adasum
