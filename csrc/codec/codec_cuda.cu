// cuda.h: hands each call to the launches for the element type. They are in cuda_launches.cuh.
#define GOSSAMER_ISA device
#include "base/check.h"
#include "base/element_type.h"
#include "codec/cuda.h"
#include "codec/cuda_launches.h"

namespace gossamer::codec::cuda {

using device::with_element_type;

namespace {

template <class Body>
void with_error_type(Dtype dtype, Body body) {
  if (dtype == Dtype::f64) return body(double{});
  GOSSAMER_CHECK(dtype == Dtype::f32, ErrorKind::codec,
                 "error feedback: the error must be float32 or float64");
  body(float{});
}

}  // namespace

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

void encode_with_error(const Spec& spec, Dtype source, const void* x, void* error, const Rows& rows,
                       uint8_t* wire, cudaStream_t stream) {
  with_error_type(spec.dtype, [&](auto element) {
    LaunchesWithError<decltype(element)>::encode_with_error(spec, source, x, error, rows, wire, stream);
  });
}

void reduce_encode_with_error(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                              int64_t valid, double scale, uint8_t* out, void* scratch, void* error,
                              cudaStream_t stream) {
  with_error_type(spec.dtype, [&](auto element) {
    LaunchesWithError<decltype(element)>::reduce_encode_with_error(spec, wire, rows, row_numel, valid, scale,
                                                                   out, scratch, error, stream);
  });
}

}  // namespace gossamer::codec::cuda
