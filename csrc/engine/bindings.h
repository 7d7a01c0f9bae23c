// Python's view of the engine. Called by module.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace gossamer {

void bind_engine(pybind11::module_& module);

}  // namespace gossamer
