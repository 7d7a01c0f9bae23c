// sparse.h for CPUs with NEON; see base/instruction_set.h.
#define GOSSAMER_NEON
#include "base/instruction_set.h"

#include "sparse/cpu_driver.inl"
