// optim.h for any CPU. Flags: -O3 -ffp-contract=off. What the other instruction sets must equal.
#define GOSSAMER_ISA scalar
#include "optim/cpu_driver.inl"

namespace gossamer::optim {
extern const Kernels scalar_kernels;
const Kernels scalar_kernels = {"scalar", scalar::adam, scalar::sgd};
}  // namespace gossamer::optim
