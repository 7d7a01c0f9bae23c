// Sums (and products, minima, ...) of n buffers in rank order, for every element type that c10d knows. Torch-free; the
// backend maps ScalarType and ReduceOp to these types. It gets pointers and knows nothing of shared memory. Called by the
// collectives of this folder. The kernels are compiled once for each instruction set and give equal bits.
#pragma once

#include <cstdint>

namespace gossamer::shm {

enum class Type : int {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  u64,
  i64,
  boolean,
  f16,
  bf16,
  f32,
  f64,
  e4m3fn,
  e4m3fnuz,
  e5m2,
  e5m2fnuz,
  c32,
  c64,
  c128,  // complex of f16, f32, f64
};
enum class Op : int { sum, avg, product, min, max, band, bor, bxor, premul_sum };

int64_t element_size(Type type);
// The type in which sums run: f32 for narrower floats, c64 for c32, else the type itself.
Type accumulate_type(Type type);
// Whether `op` is defined for `type`: no bitwise operation on floats, no order among complex numbers.
bool supports(Type type, Op op);
const char* name(Type type);
const char* name(Op op);

// out[i] = finish(s[0][i] op s[1][i] op ... s[n-1][i]), folded from the left in accumulate_type(element) and rounded once.
// `from` and `to` are each the element type or its accumulate_type, so that a sum may stop with unrounded sums on one host
// and continue from them on another. Booleans stay 0 or 1.
struct Fold {
  Type from;
  Type to;
  Op op;
  int64_t divisor = 1;              // avg: what `finish` divides by; floats truly, integers towards zero
  const double* factors = nullptr;  // premul_sum: factors[k] multiplies s[k] before the sum; null: no factor
};

// Writes the same result to every outs[0..out_count). An out may be one of the sources, but not a part of one.
// NaN propagates through min and max. Any alignment.
void reduce(const Fold& reduction, const void* const* sources, int source_count, void* const* outs,
            int out_count, int64_t numel);

}  // namespace gossamer::shm
