// optim.h compiled for AVX-512. Flags: -O3 -ffp-contract=off and AVX-512 F, BW, DQ, VL; without them the file is empty
// but for a null entry, so every build may compile it. Chosen by optim.cpp where the CPU has them all.
#define GOSSAMER_ISA avx512
#include "optim/optim.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own intrinsics (PR 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "optim/cpu_driver.inl"

namespace gossamer::optim {
static const Kernels table = {"avx512", avx512::adam, avx512::sgd};
extern const Kernels* const avx512_kernels;
const Kernels* const avx512_kernels = &table;
}  // namespace gossamer::optim
#else
namespace gossamer::optim {
extern const Kernels* const avx512_kernels;
const Kernels* const avx512_kernels = nullptr;
}  // namespace gossamer::optim
#endif
