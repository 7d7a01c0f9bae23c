// The CPU table and the registry behind device_kernels.h. The CUDA table registers itself from ops_cuda.cu,
// which is only part of CUDA builds.
#include "device_kernels.h"

#include <array>
#include <optional>
#include <sstream>

#include "errors.h"

namespace gossamer {
namespace {

constexpr size_t kDeviceTypes = static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

std::array<std::optional<DeviceKernels>, kDeviceTypes>& tables() {
  static std::array<std::optional<DeviceKernels>, kDeviceTypes> instance;
  return instance;
}

// The instruction set can be changed by tests, so the CPU table looks it up at each call.
const DeviceKernels kCpu{
    [](const codec::Spec& spec, Dtype source, const void* x, const codec::Rows& rows, uint8_t* wire) {
      codec::kernels().encode(spec, source, x, rows, wire);
    },
    [](const codec::Spec& spec, const uint8_t* wire, const codec::Rows& rows, void* out) {
      codec::kernels().decode(spec, wire, rows, out);
    },
    [](const codec::Spec& spec, const uint8_t* wire, int64_t rows, int64_t row_numel, int64_t valid,
       void* acc) { codec::kernels().decode_add(spec, wire, rows, row_numel, valid, acc); },
    [](const codec::Spec& spec, const uint8_t* wire, int64_t rows, int64_t row_numel, int64_t valid,
       double scale, uint8_t* out, void* scratch) {
      codec::kernels().reduce_encode(spec, wire, rows, row_numel, valid, scale, out, scratch);
    },
    flat::gather,
    flat::scatter,
    flat::scale,
};

const bool kCpuRegistered = register_device_kernels(c10::DeviceType::CPU, kCpu);

}  // namespace

bool register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels) {
  tables()[static_cast<size_t>(type)] = kernels;
  return true;
}

const DeviceKernels& device_kernels(c10::DeviceType type) {
  const auto& table = tables()[static_cast<size_t>(type)];
  if (!table) {
    std::ostringstream message;
    message << "device_kernels: this build of gossamer has no kernels for device type " << type
            << "; build it against a torch with that device";
    throw PythonError(ErrorKind::config, message.str());
  }
  return *table;
}

}  // namespace gossamer
