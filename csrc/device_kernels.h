// The table of kernels for a device type of torch. Used by ops.cpp, comm/, collectives/ and engine/, so that none of them
// asks which device it is on.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/macros/Export.h>

#include "kernels/table.h"

namespace gossamer {

// Throws PythonError(config) for a device type that this process has no kernels for.
C10_EXPORT const DeviceKernels& device_kernels(c10::DeviceType type);

// For devices besides the CPU and CUDA. Returns true, so that it can initialise a static object.
C10_EXPORT bool register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels);

}  // namespace gossamer
