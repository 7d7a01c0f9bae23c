// Python's view of CommHook: gossamer._C.CommHook. Apart from module.cpp because torch's futures need a large header.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "engine/bindings.h"
#include "engine/comm_hook.h"
#include "engine/work.h"

namespace py = pybind11;

namespace gossamer {
namespace {

using Future = std::shared_ptr<torch::jit::PythonFutureWrapper>;
using Release = py::call_guard<py::gil_scoped_release>;

// DDP takes the value of a Python hook's future only as a Python object. Made here, so that the worker that completes
// the future needs no GIL.
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

HookMethod method_of(const std::optional<CodecChoice>& codec, bool feedback, int64_t unit,
                     const std::optional<py::function>& call) {
  HookMethod method{codec, feedback, unit, nullptr};
  if (call) {
    method.call = [call = PythonCallable(*call)](const at::Tensor& flat,
                                                 const std::optional<at::Tensor>& error,
                                                 uint64_t nonce) { call(flat, error, nonce); };
  }
  return method;
}

}  // namespace

void bind_comm_hook(py::module_& module) {
  py::class_<HookMethod>(module, "HookMethod")
      .def(py::init(&method_of), py::arg("codec"), py::arg("feedback"), py::arg("unit"), py::arg("call"));
  py::class_<CommHook, std::shared_ptr<CommHook>>(module, "CommHook")
      .def(py::init([](CommunicatorPtr comm, std::vector<at::Tensor> params, std::vector<HookMethod> methods,
                       std::vector<int64_t> numbers, const std::optional<py::function>& whole) {
             CommHook::Whole call;
             if (whole) {
               call = [call = PythonCallable(*whole)](int64_t step, int64_t index,
                                                      const std::vector<int64_t>& of_params,
                                                      const std::vector<at::Tensor>& gradients) {
                 call(step, index, of_params, gradients);
               };
             }
             return std::make_shared<CommHook>(std::move(comm), std::move(params), std::move(methods),
                                               std::move(numbers), std::move(call));
           }),
           py::arg("comm"), py::arg("params"), py::arg("methods"), py::arg("method_of"), py::arg("whole"))
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
      .def("errors", &CommHook::errors, Release())
      .def("set_errors", &CommHook::set_errors, py::arg("errors"), Release())
      .def_property("steps", &CommHook::steps, &CommHook::set_steps)
      .def("close", &CommHook::close, Release());
}

}  // namespace gossamer
