// adasum.h compiled for AVX-512. Flags: -O3 -ffp-contract=off -mavx512f -mavx512bw -mavx512dq -mavx512vl;
// without them the file is empty but for a null entry. Chosen by adasum.cpp where the CPU has all four.
#define GOSSAMER_ISA avx512
#include "adasum/adasum.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own intrinsics (PR 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "base/lanes.h"

namespace gossamer::avx512 {
using VectorLane = Avx512;
static constexpr int kVectorBytes = 64;
}  // namespace gossamer::avx512

#include "adasum/cpu_driver.inl"

namespace gossamer::adasum {
static const Kernels table = {"avx512", avx512::sums, avx512::combine};
extern const Kernels* const avx512_kernels;
const Kernels* const avx512_kernels = &table;
}  // namespace gossamer::adasum
#else
namespace gossamer::adasum {
extern const Kernels* const avx512_kernels;
const Kernels* const avx512_kernels = nullptr;
}  // namespace gossamer::adasum
#endif
