// sparse.h for CPUs with AVX-512 (F, BW, DQ, VL); see base/instruction_set.h.
#define GOSSAMER_AVX512
#include "base/instruction_set.h"

#include "sparse/cpu_driver.inl"
