// Python's view of CommHook: gossamer._C.CommHook. Not in module.cpp because torch's futures need a large header.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "hook/comm_hook.h"
#include "python/bindings.h"
#include "python/callable.h"

namespace py = pybind11;

namespace gossamer {
namespace {

using Future = std::shared_ptr<torch::jit::PythonFutureWrapper>;
using Release = py::call_guard<py::gil_scoped_release>;

// DDP takes the value of a Python hook's future only as a Python object. It is made here, so that the worker, which
// completes the future, needs no GIL.
c10::IValue as_object(const at::Tensor& x) {
  return torch::jit::toIValue(py::cast(x), c10::PyObjectType::get());
}

template <class Submit>
Future started(const at::Tensor& result, Submit&& submit) {
  auto value = as_object(result);
  CommHook::FuturePtr future;
  {
    const py::gil_scoped_release release;
    future = submit(std::move(value));
  }
  return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
}

}  // namespace

void bind_comm_hook(py::module_& module) {
  py::class_<CommHook, std::shared_ptr<CommHook>>(module, "CommHook")
      .def(py::init([](CommunicatorPtr comm, CommunicatorPtr control, std::vector<at::Tensor> params,
                       const py::function& arrange) {
             return std::make_shared<CommHook>(
                 std::move(comm), std::move(control), std::move(params),
                 [call = PythonCallable(arrange)](int64_t index, const std::vector<int64_t>& numbers,
                                                  at::ScalarType dtype, bool anew) {
                   return call.returning<CommHook::Works>(index, numbers, dtype, anew);
                 });
           }),
           py::arg("comm"), py::arg("control"), py::arg("params"), py::arg("arrange"))
      .def(
          "reduce_bucket",
          [](CommHook& hook, const c10d::GradBucket& bucket) {
            return started(bucket.getBuffer(),
                           [&](c10::IValue result) { return hook.reduce_bucket(bucket, std::move(result)); });
          },
          py::arg("bucket"))
      .def(
          "reduce_gradient",
          [](CommHook& hook, const at::Tensor& grad, const at::Tensor& param) {
            return started(grad, [&](c10::IValue result) {
              return hook.reduce_gradient(grad, param, std::move(result));
            });
          },
          py::arg("grad"), py::arg("param"))
      .def(
          "register",
          [](const std::shared_ptr<CommHook>& hook, c10d::Reducer& reducer) {
            reducer.register_comm_hook(std::make_unique<NativeCommHook>(hook));
          },
          py::arg("reducer"))
      .def("wait", &CommHook::wait, Release())
      .def("forget", &CommHook::forget, Release())
      .def_property("steps", &CommHook::steps, &CommHook::set_steps)
      .def("close", &CommHook::close, Release());
}

}  // namespace gossamer
