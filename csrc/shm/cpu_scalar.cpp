// reduce.h for any CPU: what the other instruction sets must equal, and the kernels that their tables leave out.
#include "base/instruction_set.h"

#include "shm/reduce_kernels.inl"
