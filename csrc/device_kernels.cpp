// The CPU's table, and torch's current stream for CUDA's, which kernels/cuda.cu fills.
#include "device_kernels.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>

#include "errors.h"

namespace gossamer {
namespace {

std::map<c10::DeviceType, DeviceKernels>& other_kernels() {
  static std::map<c10::DeviceType, DeviceKernels> instance;
  return instance;
}

constexpr int64_t kThreadNumel = 32768;  // a thread for fewer elements does not pay; torch's own limit

// body(begin, end) on torch's threads, for ranges of the elements of all segments. The caller waits for an update; codecs
// run beside the caller, on the engine's thread, and get no threads.
template <class Body>
void on_threads(const optim::Segment* segments, int64_t count, const Body& body) {
  int64_t numel = 0;
  for (const optim::Segment* s = segments; s != segments + count; ++s) numel += s->numel;
  // at::parallel_for also sets the calling thread's share of threads, which MKL uses from then on.
  if (numel <= kThreadNumel) return body(0, numel);
  at::parallel_for(0, numel, kThreadNumel, body);
}

// Tests can change the instruction set, so the CPU table looks it up at each call.
const DeviceKernels kCpu{
    [](const codec::Spec& spec, Dtype source, const void* x, const codec::Rows& rows, uint8_t* wire) {
      codec::kernels().encode(spec, source, x, rows, wire);
    },
    [](const codec::Spec& spec, const codec::WireRows& wire, const codec::Rows& rows, void* out) {
      codec::kernels().decode(spec, wire, rows, out);
    },
    [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
       void* acc) { codec::kernels().decode_add(spec, wire, rows, row_numel, valid, acc); },
    [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
       double scale, uint8_t* out, void* scratch) {
      codec::kernels().reduce_encode(spec, wire, rows, row_numel, valid, scale, out, scratch);
    },
    [](const codec::Spec& spec, Dtype source, const void* x, void* error, const codec::Rows& rows,
       uint8_t* wire) { codec::kernels().encode_with_error(spec, source, x, error, rows, wire); },
    [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
       double scale, uint8_t* out, void* scratch, void* error) {
      codec::kernels().reduce_encode_with_error(spec, wire, rows, row_numel, valid, scale, out, scratch,
                                                error);
    },
    flat::gather,
    flat::scatter,
    flat::scale,
    flat::sum_rows,
    nullptr,  // backend/ meets in memory that its processes share
    nullptr,
    nullptr,
    [](Dtype dtype, const optim::Adam& adam, const optim::Segment* segments, int64_t count) {
      on_threads(segments, count,
                 [&](int64_t begin, int64_t end) { optim::adam(dtype, adam, segments, count, begin, end); });
    },
    [](Dtype dtype, const optim::Sgd& sgd, const optim::Segment* segments, int64_t count) {
      on_threads(segments, count,
                 [&](int64_t begin, int64_t end) { optim::sgd(dtype, sgd, segments, count, begin, end); });
    },
    [] { return false; },
};

// By c10's interface for every device: with CUDA's own one, this file would need a torch with CUDA.
void* current_cuda_stream() {
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  return cuda.getStream(cuda.getDevice()).native_handle();
}

[[maybe_unused]] const bool stream_hooked = (cuda_hooks().current_stream = current_cuda_stream, true);

}  // namespace

bool register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels) {
  return other_kernels().insert_or_assign(type, kernels), true;
}

const DeviceKernels& device_kernels(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return kCpu;
  if (type == c10::DeviceType::CUDA && cuda_hooks().kernels != nullptr) return *cuda_hooks().kernels;
  const auto other = other_kernels().find(type);
  check_argument(other != other_kernels().end(),
                 "device_kernels: this installation of gossamer has no kernels for device type ", type,
                 "; for CUDA install the wheel of CUDA kernels, or build gossamer where nvcc is on PATH");
  return other->second;
}

}  // namespace gossamer
