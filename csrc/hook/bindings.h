// Python's view of the hook for stock DDP. Called by module.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace gossamer {

void bind_comm_hook(pybind11::module_& module);

}  // namespace gossamer
