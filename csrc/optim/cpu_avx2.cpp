// optim.h compiled for AVX2. Flags: -O3 -ffp-contract=off -mavx2 -mf16c -mfma; without them the file is empty
// but for a null entry, so every build may compile it. Chosen by optim.cpp where the CPU has all three.
#define GOSSAMER_ISA avx2
#include "optim/optim.h"

#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#include "optim/cpu_driver.inl"

namespace gossamer::optim {
static const Kernels table = {"avx2", avx2::adam, avx2::sgd};
extern const Kernels* const avx2_kernels;
const Kernels* const avx2_kernels = &table;
}  // namespace gossamer::optim
#else
namespace gossamer::optim {
extern const Kernels* const avx2_kernels;
const Kernels* const avx2_kernels = nullptr;
}  // namespace gossamer::optim
#endif
