// Errors of the torch side: C++ exceptions that become gossamer.errors classes in Python, even across torch's autograd
// engine, which knows only torch::PyTorchError. The Torch-free core does not use them; module.cpp translates its
// gossamer::Error.
#pragma once

#include <sstream>
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

// Throws PythonError; the text is the parts.
template <class... Parts>
[[noreturn]] void raise_python(ErrorKind kind, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw PythonError(kind, text.str());
}

// Throws PythonError(config) unless ok. Checks the arguments that a user gives to an operation.
template <class... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (!ok) raise_python(ErrorKind::config, parts...);
}

// Python's AssertionError, for misuse that programs expect to raise it.
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
