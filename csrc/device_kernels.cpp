// The CPU table and the registry behind device_kernels.h. ops_cuda.cu, which only CUDA builds compile, registers the CUDA
// table.
#include "device_kernels.h"

#include <ATen/Parallel.h>

#include <array>
#include <optional>

#include "errors.h"

namespace gossamer {
namespace {

constexpr size_t kDeviceTypes = static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

std::array<std::optional<DeviceKernels>, kDeviceTypes>& tables() {
  static std::array<std::optional<DeviceKernels>, kDeviceTypes> instance;
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

const bool kCpuRegistered = register_device_kernels(c10::DeviceType::CPU, kCpu);

}  // namespace

bool register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels) {
  tables()[static_cast<size_t>(type)] = kernels;
  return true;
}

const DeviceKernels& device_kernels(c10::DeviceType type) {
  const auto& table = tables()[static_cast<size_t>(type)];
  check_argument(table.has_value(), "device_kernels: this build of gossamer has no kernels for device type ",
                 type, "; build it against a torch with that device");
  return *table;
}

}  // namespace gossamer
