// codec.h compiled for the base instruction set; the compiler may use its vectors (SSE2, NEON).
// Flags: -O3 -ffp-contract=off. Chosen by codec.cpp where nothing wider runs.
#define GOSSAMER_ISA scalar
#include "base/lanes.h"

namespace gossamer::scalar {
using VectorLane = Scalar;
}

#include "codec/cpu_driver.inl"

namespace gossamer::codec {
extern const Kernels scalar_kernels;
const Kernels scalar_kernels = {"scalar",
                                scalar::encode,
                                scalar::decode,
                                scalar::decode_add,
                                scalar::reduce_encode,
                                scalar::encode_with_error,
                                scalar::reduce_encode_with_error};
}  // namespace gossamer::codec
