// Python's view of observe/: recorders, the trace, and a span for Python. Called by module.cpp; it includes no torch
// header, so it compiles in seconds. Times are nanoseconds of the recorder's steady clock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "observe/recorder.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace gossamer {

using observe::Recorder;

std::vector<std::tuple<std::string, int64_t, double>> activity_of(const Recorder& recorder) {
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  const double unix_s = std::chrono::duration<double>(since_epoch).count();
  const int64_t now = observe::now_ns();
  std::vector<std::tuple<std::string, int64_t, double>> result;
  for (const auto& each : recorder.activity())
    result.emplace_back(each.what, each.bucket, unix_s - static_cast<double>(now - each.since_ns) * 1e-9);
  return result;
}

namespace {

void bind_recorder(py::module_& module) {
  py::class_<Recorder, std::shared_ptr<Recorder>>(module, "Recorder")
      .def_property_readonly("number", &Recorder::number)
      .def("activity", &activity_of)
      .def("steps",
           [](const Recorder& recorder) {
             py::list result;
             for (const auto& step : recorder.steps()) {
               result.append(py::make_tuple(step.wall, step.communication, step.exposed, step.waits,
                                            step.communication_of));
             }
             return result;
           })
      .def("totals",
           [](const Recorder& recorder) {
             const auto totals = recorder.totals();
             return py::make_tuple(totals.steps, totals.wall, totals.communication, totals.exposed);
           })
      .def("clear", &Recorder::clear);
}

py::tuple as_tuple(const observe::TraceEvent& event) {
  return py::make_tuple(std::string(event.name.data()), std::string(event.category), event.thread,
                        event.instant, event.bucket, event.step, event.bytes, event.begin_ns, event.end_ns);
}

}  // namespace

void bind_observe(py::module_& module) {
  bind_recorder(module);
  module.def("now_ns", &observe::now_ns);
  module.def("set_counting", &observe::set_counting, py::arg("on"));
  module.def("tracing", &observe::tracing);
  module.def("start_trace", &observe::start_trace, py::arg("capacity"));
  module.def("stop_trace", [] {
    const auto taken = observe::stop_trace();
    py::list events;
    for (const auto& event : taken.events) events.append(as_tuple(event));
    return py::make_tuple(events, taken.replaced);
  });
  module.def(
      "add_span",
      [](const std::string& name, int64_t begin_ns, int64_t step) {
        observe::TraceEvent event;
        event.set_name(name);
        event.category = "python";
        event.step = step;
        event.begin_ns = begin_ns;
        event.end_ns = observe::now_ns();
        observe::add_event(event);
      },
      py::arg("name"), py::arg("begin_ns"), py::arg("step"));
}

}  // namespace gossamer
