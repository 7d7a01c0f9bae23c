// The Python side of errors.h: finds the classes in gossamer.errors. Called while an exception crosses into Python, with
// the GIL held.
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

std::string first_line(const char* text) {
  const std::string whole(text);
  return whole.substr(0, whole.find('\n'));
}

std::string readable_bytes(int64_t bytes) {
  if (bytes < 100000) return std::to_string(bytes) + " bytes";
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

}  // namespace gossamer
