// Errors of the torch side: C++ exceptions that arrive in Python as gossamer.errors classes, also when they
// cross torch's autograd engine (which only knows torch::PyTorchError). Not used by the Torch-free core,
// whose gossamer::Error is translated in module.cpp.
#pragma once

#include <string>
#include <utility>

#include <torch/csrc/Exceptions.h>

#include "base/check.h"

namespace gossamer {

// A gossamer::Error that keeps its Python class on its way through autograd.
class PythonError : public torch::PyTorchError {
 public:
  PythonError(ErrorKind kind, std::string message) : torch::PyTorchError(std::move(message)), kind(kind) {}
  PyObject* python_type() override;  // GIL held
  ErrorKind kind;
};

// Python's own, for misuse that programs expect as such.
class AssertionError : public torch::PyTorchError {
 public:
  explicit AssertionError(std::string message) : torch::PyTorchError(std::move(message)) {}
  PyObject* python_type() override { return PyExc_AssertionError; }
};

PyObject* python_error_type(ErrorKind kind);  // borrowed, GIL held

// c10d's errors carry a C++ backtrace after the first line; the first line is what a user can act on.
std::string first_line(const char* text);

// "6.3 MB" or "512 bytes", for messages.
std::string readable_bytes(int64_t bytes);

}  // namespace gossamer
