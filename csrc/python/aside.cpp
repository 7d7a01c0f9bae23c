// Python's view of AsideStore: gossamer._C.AsideStore.
#include "comm/aside.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"

namespace py = pybind11;

namespace gossamer {

void bind_aside(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<AsideStore>(module, "AsideStore")
      .def(py::init<c10::intrusive_ptr<c10d::Store>>(), py::arg("store"))
      .def("add", &AsideStore::add, py::arg("key"), py::arg("value"), Release())
      .def("set", &AsideStore::set, py::arg("key"), py::arg("value"), Release())
      .def("check", &AsideStore::check, py::arg("keys"), Release())
      .def("get", &AsideStore::get, py::arg("keys"), Release())
      .def_static("leave", &AsideStore::leave, Release());
}

}  // namespace gossamer
