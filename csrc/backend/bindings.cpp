// See bindings.h. The operations themselves are bound by torch, on c10d::Backend.
#include "backend/bindings.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/backend.h"
#include "backend/symmetric_memory.h"

namespace py = pybind11;

namespace gossamer {

void bind_backend(py::module_& module) {
  py::module_::import("torch.distributed");  // registers c10d::Backend and its stores with pybind11
  py::class_<GossamerBackend, c10d::Backend, c10::intrusive_ptr<GossamerBackend>>(module, "GossamerBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, std::chrono::milliseconds>(), py::arg("store"),
           py::arg("rank"), py::arg("size"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &GossamerBackend::getBackendOptions)
      .def_property_readonly("hosts", &GossamerBackend::hosts)
      .def_property_readonly("memory_bytes", &GossamerBackend::memory_bytes)
      .def("allocate", &GossamerBackend::allocate, py::arg("bytes"),
           py::call_guard<py::gil_scoped_release>());
  register_symmetric_memory();
}

}  // namespace gossamer
