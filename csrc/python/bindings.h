// The parts of gossamer._C, one file each; module.cpp puts them together. Only this folder knows Python: everything below
// is compiled without Python's headers, once for all versions of Python (setup.py).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "observe/recorder.h"

namespace gossamer {

// (what, bucket or -1, since when in seconds of the Unix epoch)
std::vector<std::tuple<std::string, int64_t, double>> activity_of(const observe::Recorder& recorder);

void bind_aside(pybind11::module_& module);
void bind_backend(pybind11::module_& module);
void bind_comm_hook(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_named(pybind11::module_& module);
void bind_observe(pybind11::module_& module);

}  // namespace gossamer
