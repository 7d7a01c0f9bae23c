// The CUDA table of table.h: every kernel on the caller's current stream, which the torch side tells.
#include "codec/cuda.h"
#include "flat/cuda.h"
#include "kernels/table.h"
#include "optim/cuda.h"

namespace gossamer {
namespace {

cudaStream_t current_stream() { return static_cast<cudaStream_t>(cuda_hooks().current_stream()); }

bool is_capturing() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(current_stream(), &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  // Clears the error: the legacy stream must not be asked while another one captures.
  (void)cudaGetLastError();
  return false;
}

const DeviceKernels kCuda{
    [](const codec::Spec& spec, Dtype source, const void* x, const codec::Rows& rows, uint8_t* wire) {
      codec::cuda::encode(spec, source, x, rows, wire, current_stream());
    },
    [](const codec::Spec& spec, const codec::WireRows& wire, const codec::Rows& rows, void* out) {
      codec::cuda::decode(spec, wire, rows, out, current_stream());
    },
    [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
       void* acc) { codec::cuda::decode_add(spec, wire, rows, row_numel, valid, acc, current_stream()); },
    [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
       double scale, uint8_t* out, void* scratch) {
      codec::cuda::reduce_encode(spec, wire, rows, row_numel, valid, scale, out, scratch, current_stream());
    },
    [](const codec::Spec& spec, Dtype source, const void* x, void* error, const codec::Rows& rows,
       uint8_t* wire) {
      codec::cuda::encode_with_error(spec, source, x, error, rows, wire, current_stream());
    },
    [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
       double scale, uint8_t* out, void* scratch, void* error) {
      codec::cuda::reduce_encode_with_error(spec, wire, rows, row_numel, valid, scale, out, scratch, error,
                                            current_stream());
    },
    [](Dtype dtype, const flat::Segment* segments, int64_t count, void* flat, double scale) {
      flat::cuda::gather(dtype, segments, count, flat, scale, current_stream());
    },
    [](Dtype dtype, const flat::Segment* segments, int64_t count, const void* flat, double scale) {
      flat::cuda::scatter(dtype, segments, count, flat, scale, current_stream());
    },
    [](Dtype dtype, void* flat, int64_t numel, double scale) {
      flat::cuda::scale(dtype, flat, numel, scale, current_stream());
    },
    [](Dtype dtype, const flat::RowSum& sum, double scale) {
      flat::cuda::sum_rows(dtype, sum, scale, current_stream());
    },
    [](const flat::Meeting& meeting) { flat::cuda::meet(meeting, current_stream()); },
    flat::cuda::map_host,
    flat::cuda::unmap_host,
    [](Dtype dtype, const optim::Adam& adam, const optim::Segment* segments, int64_t count) {
      optim::cuda::adam(dtype, adam, segments, count, current_stream());
    },
    [](Dtype dtype, const optim::Sgd& sgd, const optim::Segment* segments, int64_t count) {
      optim::cuda::sgd(dtype, sgd, segments, count, current_stream());
    },
    is_capturing,
};

[[maybe_unused]] const bool kernels_hooked = (cuda_hooks().kernels = &kCuda, true);

}  // namespace
}  // namespace gossamer
