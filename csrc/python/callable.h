// Python callables that native threads call: without the GIL around them, and with Python's exceptions carried along.
#pragma once

#include <pybind11/pybind11.h>

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <utility>

#include "engine/work.h"

namespace gossamer {

// Native threads may call and destroy it without holding the GIL. The callable's exception becomes a python_error, which
// crosses threads and autograd.
class PythonCallable {
 public:
  explicit PythonCallable(pybind11::object callable)
      : callable_(new pybind11::object(std::move(callable)), [](pybind11::object* object) {
          if (!Py_IsInitialized()) return;  // the interpreter has ended, and its objects with it
          pybind11::gil_scoped_acquire gil;
          delete object;
        }) {}

  // Returns whether the callable returned True itself.
  template <class... Arguments>
  bool operator()(Arguments&&... arguments) const {
    const pybind11::gil_scoped_acquire gil;
    return call(std::forward<Arguments>(arguments)...).ptr() == Py_True;
  }

  template <class Result, class... Arguments>
  Result returning(Arguments&&... arguments) const {
    const pybind11::gil_scoped_acquire gil;
    return call(std::forward<Arguments>(arguments)...).template cast<Result>();
  }

 private:
  template <class... Arguments>
  pybind11::object call(Arguments&&... arguments) const {
    try {
      return (*callable_)(std::forward<Arguments>(arguments)...);
    } catch (pybind11::error_already_set& error) {
      error.restore();
      ::python_error carried;
      carried.persist();
      throw carried;
    }
  }
  std::shared_ptr<pybind11::object> callable_;
};

// Calls callable(bucket). The callable gives its own errors their context.
class PythonWork : public BucketWork {
 public:
  explicit PythonWork(pybind11::object callable) : callable_(std::move(callable)) {}
  void run(Communicator&, const std::shared_ptr<Bucket>& bucket) override { callable_(bucket); }

 private:
  PythonCallable callable_;
};

}  // namespace gossamer
