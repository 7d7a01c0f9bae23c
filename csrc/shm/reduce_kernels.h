// Between reduce.cpp, which checks and simplifies a reduction, and the kernels, which cpu_*.cpp compile once for each
// instruction set. Not for callers of reduce(); tests and benchmarks pick a table by name here.
#pragma once

#include <cstdint>

#include "shm/reduce.h"

namespace gossamer::shm {

// What a kernel needs of a Fold; the kernel already knows its types and operation.
struct Job {
  const void* const* sources;
  int source_count;  // at least 1
  void* const* outs;
  int out_count;
  int64_t numel;  // components: a complex number counts as two
  Op op;
  int64_t divisor;        // 1 unless the operation is an average
  const double* factors;  // null unless it is premul_sum
};

using Kernel = void (*)(const Job& job);

struct Kernels {
  const char* name;  // "scalar", "neon", "avx2", "avx512"
  // Null where this table has none; the scalar table has all that reduce.cpp asks for.
  Kernel (*find)(Type from, Type to, Op op);
};

// The kernels for this machine, chosen once; `select_kernels` picks by name and returns false if this CPU or
// build lacks them.
const Kernels& kernels();
bool select_kernels(const char* name);
const Kernels* kernels_by_name(const char* name);  // nullptr if this CPU or build lacks them

}  // namespace gossamer::shm
