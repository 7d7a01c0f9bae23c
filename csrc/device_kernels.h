// The table of kernels for a device type of torch. Used by ops.cpp, comm/, collectives/ and engine/, so that none of them
// asks which device it is on.
#pragma once

#include <c10/core/DeviceType.h>

#include "kernels/table.h"

namespace gossamer {

// Throws PythonError(config) for a device type that this process has no kernels for.
const DeviceKernels& device_kernels(c10::DeviceType type);

}  // namespace gossamer
