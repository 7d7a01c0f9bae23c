// Python's view of this folder: gossamer._C.NamedCollectives and NamedOperation. Called by module.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace gossamer {

void bind_named(pybind11::module_& module);

}  // namespace gossamer
