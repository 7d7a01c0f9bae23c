// reduce.h compiled for AVX2. Flags: -O3 -ffp-contract=off -mavx2 -mf16c; without them the file is empty but
// for a null entry, so every build may compile it. Chosen by reduce.cpp where the CPU has both.
#define GOSSAMER_ISA avx2
#include "shm/reduce_kernels.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "base/lanes.h"

namespace gossamer::avx2 {
using VectorLane = Avx2;
static constexpr int64_t kVectorBytes = 32;
static constexpr bool kIsBase = false;
}  // namespace gossamer::avx2

#include "shm/reduce_kernels.inl"

namespace gossamer::shm {
static const Kernels table = {"avx2", avx2::find};
extern const Kernels* const avx2_kernels;
const Kernels* const avx2_kernels = &table;
}  // namespace gossamer::shm
#else
namespace gossamer::shm {
extern const Kernels* const avx2_kernels;
const Kernels* const avx2_kernels = nullptr;
}  // namespace gossamer::shm
#endif
