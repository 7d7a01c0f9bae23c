// sparse.h for any CPU: what the other instruction sets must equal.
#include "base/instruction_set.h"

#include "sparse/cpu_driver.inl"
