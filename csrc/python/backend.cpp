// Python's view of GossamerBackend. The operations themselves are bound by torch, on c10d::Backend.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <thread>

#include "backend/backend.h"
#include "backend/gil.h"
#include "backend/symmetric_memory.h"
#include "python/bindings.h"

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
  // Registered first, so called last: the exit handlers of modules that import this one may still use groups.
  const auto end = [] {
    WhilePythonLives::end();
    // Torch's own threads, such as Gloo's, are not counted. Those that want the GIL for a callback get it now.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  };
  py::module_::import("atexit").attr("register")(
      py::cpp_function(end, py::call_guard<py::gil_scoped_release>()));
}

}  // namespace gossamer
