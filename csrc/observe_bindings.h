// What module.cpp needs from observe_bindings.cpp: the classes of observe/ for Python, and the activity of an engine's
// worker. The recorder, which knows no Python, does not include this.
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
