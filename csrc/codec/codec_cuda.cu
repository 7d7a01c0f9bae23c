// cuda.h: hands each call to the launches for the element type. They are in cuda_launches.cuh.
#define GOSSAMER_ISA device
#include "base/element_type.h"
#include "codec/cuda.h"
#include "codec/cuda_launches.h"

namespace gossamer::codec::cuda {

using device::with_element_type;

void encode(const Spec& spec, Dtype source, const void* x, const Rows& rows, uint8_t* wire,
            cudaStream_t stream) {
  with_element_type(spec.dtype, [&](auto element) {
    Launches<decltype(element)>::encode(spec, source, x, rows, wire, stream);
  });
}

void decode(const Spec& spec, const WireRows& wire, const Rows& rows, void* out, cudaStream_t stream) {
  with_element_type(
      spec.dtype, [&](auto element) { Launches<decltype(element)>::decode(spec, wire, rows, out, stream); });
}

void decode_add(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
                void* acc, cudaStream_t stream) {
  with_element_type(spec.dtype, [&](auto element) {
    Launches<decltype(element)>::decode_add(spec, wire, rows, row_numel, valid, acc, stream);
  });
}

void reduce_encode(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
                   double scale, uint8_t* out, void* scratch, cudaStream_t stream) {
  with_element_type(spec.dtype, [&](auto element) {
    Launches<decltype(element)>::reduce_encode(spec, wire, rows, row_numel, valid, scale, out, scratch,
                                               stream);
  });
}

}  // namespace gossamer::codec::cuda
