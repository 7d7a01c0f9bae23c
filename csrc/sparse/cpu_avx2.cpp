// sparse.h for CPUs with AVX2, F16C and FMA; see base/instruction_set.h.
#define GOSSAMER_AVX2
#include "base/instruction_set.h"

#include "sparse/cpu_driver.inl"
