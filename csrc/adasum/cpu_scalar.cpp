// adasum.h for any CPU. Flags: -O3 -ffp-contract=off. What the other instruction sets must equal; the vectors of 16 bytes
// are those that every 64-bit CPU has.
#define GOSSAMER_ISA scalar
#include "base/lanes.h"

namespace gossamer::scalar {
using VectorLane = Scalar;
static constexpr int kVectorBytes = 16;
}  // namespace gossamer::scalar

#include "adasum/cpu_driver.inl"

namespace gossamer::adasum {
extern const Kernels scalar_kernels;
const Kernels scalar_kernels = {"scalar", scalar::sums, scalar::combine};
}  // namespace gossamer::adasum
