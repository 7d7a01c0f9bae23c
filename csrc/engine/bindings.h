// Python's view of what the engine's folder has beside the engine itself. Called by module.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace gossamer {

void bind_comm_hook(pybind11::module_& module);

}  // namespace gossamer
