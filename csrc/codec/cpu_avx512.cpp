// codec.h compiled for AVX-512. Flags: -O3 -ffp-contract=off -mavx512f -mavx512bw -mavx512dq -mavx512vl;
// without them the file is empty but for a null entry. Chosen by codec.cpp where the CPU has all four.
#define GOSSAMER_ISA avx512
#include "codec/codec.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own intrinsics (PR 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "base/lanes.h"

namespace gossamer::avx512 {
using VectorLane = Avx512;
}

#include "codec/cpu_driver.inl"

namespace gossamer::codec {
static const Kernels table = {"avx512",
                              avx512::encode,
                              avx512::decode,
                              avx512::decode_add,
                              avx512::reduce_encode,
                              avx512::encode_with_error,
                              avx512::reduce_encode_with_error};
extern const Kernels* const avx512_kernels;
const Kernels* const avx512_kernels = &table;
}  // namespace gossamer::codec
#else
namespace gossamer::codec {
extern const Kernels* const avx512_kernels;
const Kernels* const avx512_kernels = nullptr;
}  // namespace gossamer::codec
#endif
