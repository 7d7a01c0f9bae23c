// adasum.h compiled for AVX2. Flags: -O3 -ffp-contract=off -mavx2 -mf16c; without them the file is empty but
// for a null entry, so every build may compile it. Chosen by adasum.cpp where the CPU has both.
#define GOSSAMER_ISA avx2
#include "adasum/adasum.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "base/lanes.h"

namespace gossamer::avx2 {
using VectorLane = Avx2;
static constexpr int kVectorBytes = 32;
}  // namespace gossamer::avx2

#include "adasum/cpu_driver.inl"

namespace gossamer::adasum {
static const Kernels table = {"avx2", avx2::sums, avx2::combine};
extern const Kernels* const avx2_kernels;
const Kernels* const avx2_kernels = &table;
}  // namespace gossamer::adasum
#else
namespace gossamer::adasum {
extern const Kernels* const avx2_kernels;
const Kernels* const avx2_kernels = nullptr;
}  // namespace gossamer::adasum
#endif
