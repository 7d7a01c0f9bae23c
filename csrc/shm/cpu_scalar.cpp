// reduce.h compiled for the base instruction set, in vectors of 16 bytes (SSE2, NEON).
// Flags: -O3 -ffp-contract=off. Chosen by reduce.cpp where nothing wider runs, and for the kernels that the
// other tables leave out.
#define GOSSAMER_ISA scalar
#include "base/lanes.h"

namespace gossamer::scalar {
using VectorLane = Scalar;
static constexpr int64_t kVectorBytes = 16;
static constexpr bool kIsBase = true;
}  // namespace gossamer::scalar

#include "shm/reduce_kernels.inl"

namespace gossamer::shm {
extern const Kernels scalar_kernels;
const Kernels scalar_kernels = {"scalar", scalar::find};
}  // namespace gossamer::shm
