// codec.h compiled for AVX2. Flags: -O3 -ffp-contract=off -mavx2 -mf16c; without them the file is empty but
// for a null entry, so every build may compile it. Chosen by codec.cpp where the CPU has both.
#define GOSSAMER_ISA avx2
#include "codec/codec.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "base/lanes.h"

namespace gossamer::avx2 {
using VectorLane = Avx2;
}

#include "codec/cpu_driver.inl"

namespace gossamer::codec {
static const Kernels table = {"avx2",
                              avx2::encode,
                              avx2::decode,
                              avx2::decode_add,
                              avx2::reduce_encode,
                              avx2::encode_with_error,
                              avx2::reduce_encode_with_error};
extern const Kernels* const avx2_kernels;
const Kernels* const avx2_kernels = &table;
}  // namespace gossamer::codec
#else
namespace gossamer::codec {
extern const Kernels* const avx2_kernels;
const Kernels* const avx2_kernels = nullptr;
}  // namespace gossamer::codec
#endif
