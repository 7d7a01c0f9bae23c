// The Python side of errors.h: looks the classes up in gossamer.errors. Called while an exception crosses
// into Python, with the GIL held.
#include "errors.h"

#include <pybind11/pybind11.h>

#include <cstdio>

namespace gossamer {

PyObject* python_error_type(ErrorKind kind) {
  const char* name = kind == ErrorKind::config  ? "ConfigError"
                     : kind == ErrorKind::codec ? "CodecError"
                                                : "CommError";
  // The module keeps its classes alive, so a borrowed pointer stays valid.
  return pybind11::module_::import("gossamer.errors").attr(name).ptr();
}

PyObject* PythonError::python_type() { return python_error_type(kind); }

std::string megabytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), bytes < 100000 ? "%.3f MB" : "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

}  // namespace gossamer
