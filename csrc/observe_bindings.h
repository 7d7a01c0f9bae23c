// What module.cpp needs of observe_bindings.cpp: the classes of observe/ as Python sees them, and what an engine's
// worker is at. Not included by the recorder itself, which knows no Python.
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
void bind_observe(pybind11::module_& module);

}  // namespace gossamer
