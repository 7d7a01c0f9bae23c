// What errors.h declares: exceptions that find their classes in gossamer.errors, with the GIL held, while they cross into
// Python.
#include "python/errors.h"

#include <pybind11/pybind11.h>

namespace gossamer {

PyObject* python_error_type(ErrorKind kind) {
  const char* name = kind == ErrorKind::config  ? "ConfigError"
                     : kind == ErrorKind::codec ? "CodecError"
                                                : "CommError";
  // The module keeps its classes alive, so a borrowed pointer stays valid.
  return pybind11::module_::import("gossamer.errors").attr(name).ptr();
}

PyObject* PythonError::python_type() { return python_error_type(kind); }

std::exception_ptr make_python_error(ErrorKind kind, std::string message) {
  return std::make_exception_ptr(PythonError(kind, std::move(message)));
}

void raise_assertion(std::string message) { throw AssertionError(std::move(message)); }

bool has_python_class(const std::exception& error) {
  return dynamic_cast<const torch::PyTorchError*>(&error) != nullptr ||
         dynamic_cast<const ::python_error*>(&error) != nullptr;
}

}  // namespace gossamer
