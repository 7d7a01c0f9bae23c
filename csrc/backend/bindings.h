// Python's view of the backend: gossamer._C.GossamerBackend. Called by module.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace gossamer {

void bind_backend(pybind11::module_& module);

}  // namespace gossamer
