// Lets go of Python's lock, where this thread holds it, for what may wait for a thread that wants it. Used by the backend.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace gossamer {

class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace gossamer
