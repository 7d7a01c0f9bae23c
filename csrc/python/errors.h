// The Python classes of errors.h. torch::PyTorchError is the one kind of exception that keeps its Python class on its way
// through torch's autograd engine.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

#include "../errors.h"  // "errors.h" would be this file

namespace gossamer {

class PythonError : public torch::PyTorchError, public RaisedError {
 public:
  PythonError(ErrorKind kind, std::string message)
      : torch::PyTorchError(message), RaisedError{kind, std::move(message)} {}
  PyObject* python_type() override;  // GIL held
};

// Python's AssertionError, for misuse that programs expect to raise it.
class AssertionError : public torch::PyTorchError {
 public:
  explicit AssertionError(std::string message) : torch::PyTorchError(std::move(message)) {}
  PyObject* python_type() override { return PyExc_AssertionError; }
};

PyObject* python_error_type(ErrorKind kind);  // borrowed, GIL held

}  // namespace gossamer
