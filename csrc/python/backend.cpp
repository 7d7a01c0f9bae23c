// Python's view of GossamerBackend. The operations themselves are bound by torch, on c10d::Backend.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <thread>

#include "backend/backend.h"
#include "backend/gil.h"
#include "backend/symmetric_memory.h"
#include "encoded/backend.h"
#include "python/bindings.h"
#include "python/callable.h"

namespace py = pybind11;

namespace gossamer {

namespace {

void bind_codec_backend(py::module_& module) {
  using Hosts = std::vector<std::vector<int>>;
  py::class_<CodecOptions, c10d::Backend::Options, c10::intrusive_ptr<CodecOptions>>(module, "CodecOptions")
      .def(py::init([](std::optional<CodecChoice> codec, std::optional<CodecChoice> gather_codec,
                       int64_t min_bytes, std::optional<Hosts> hosts, std::string text) {
             auto options = c10::make_intrusive<CodecOptions>();
             options->codec = codec;
             options->gather_codec = gather_codec;
             options->min_bytes = min_bytes;
             options->hosts = std::move(hosts);
             options->text = std::move(text);
             return options;
           }),
           py::arg("codec"), py::arg("gather_codec"), py::arg("min_bytes"), py::arg("hosts"), py::arg("text"))
      .def_readonly("text", &CodecOptions::text)
      .def("__repr__", [](const CodecOptions& options) { return options.text; })
      .def(
          "__deepcopy__",
          [](const CodecOptions& options, const py::dict&) {
            return c10::make_intrusive<CodecOptions>(options);
          },
          py::arg("memo"));
  // connect(store, rank, size, timeout, hosts, device) makes the connections.
  py::class_<CodecBackend, GossamerBackend, c10::intrusive_ptr<CodecBackend>>(module, "CodecBackend")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                       std::chrono::milliseconds timeout, const c10::intrusive_ptr<CodecOptions>& options,
                       const py::function& connect) {
             const auto call = [connect = PythonCallable(connect)](const CodecBackend::Ranks& ranks,
                                                                   const CodecOptions& own,
                                                                   at::Device device) {
               return connect.returning<CommunicatorPtr>(ranks.store, ranks.rank, ranks.size, ranks.timeout,
                                                         own.hosts, device);
             };
             const py::gil_scoped_release release;
             return c10::make_intrusive<CodecBackend>(
                 CodecBackend::Ranks{std::move(store), rank, size, timeout}, options, call);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("options"),
           py::arg("connect"))
      .def_property_readonly("comm", &CodecBackend::comm)
      .def_property_readonly("device_comm", [](CodecBackend& backend) {
        const WithoutGil without_gil;
        return backend.device_comm();
      });
}

}  // namespace

void bind_backend(py::module_& module) {
  py::module_::import("torch.distributed");  // registers c10d::Backend and its stores with pybind11
  py::class_<GossamerBackend, c10d::Backend, c10::intrusive_ptr<GossamerBackend>>(module, "GossamerBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, std::chrono::milliseconds,
                    const std::string&>(),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("settings") = "",
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &GossamerBackend::getBackendOptions)
      .def_property_readonly("hosts", &GossamerBackend::hosts)
      .def_property_readonly("memory_bytes", &GossamerBackend::memory_bytes)
      .def("allocate", &GossamerBackend::allocate, py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def(
          "connect_elsewhere",
          [](GossamerBackend& backend, const std::string& type, const py::function& connect) {
            // connect(store, rank, size, timeout, device) makes a backend.
            const auto call = [connect = PythonCallable(connect)](const GossamerBackend::Ranks& ranks,
                                                                  at::Device device) {
              return connect.returning<c10::intrusive_ptr<c10d::Backend>>(ranks.store, ranks.rank, ranks.size,
                                                                          ranks.timeout, device);
            };
            backend.connect_elsewhere(at::Device(type).type(), call);
          },
          py::arg("device_type"), py::arg("connect"))
      .def(
          "backend_of",
          [](GossamerBackend& backend, at::Device device) {
            return c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&backend.backend_of(device));
          },
          py::arg("device"), py::call_guard<py::gil_scoped_release>());
  bind_codec_backend(module);
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
