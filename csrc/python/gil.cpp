// What backend/gil.h declares.
#include "backend/gil.h"

#include <pybind11/pybind11.h>

#include <torch/csrc/Exceptions.h>

namespace gossamer {

WithoutGil::WithoutGil() : saved_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (saved_) PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
}

void raise_interrupt() {
  if (!Py_IsInitialized()) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  ::python_error interrupt;
  interrupt.persist();
  throw interrupt;
}

}  // namespace gossamer
