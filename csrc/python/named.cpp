// Python's view of named/: operations matched by name. Everything that may wait, or may need a lock that the negotiation's threads hold, releases the GIL;
// callbacks into Python take it.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "backend/gil.h"
#include "named/adasum.h"
#include "named/collectives.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace gossamer {
namespace {

using namespace named;
using negotiate::Collective;
using Release = py::call_guard<py::gil_scoped_release>;

constexpr auto kLookForSignals = std::chrono::milliseconds(100);

Collective kind_of(const std::string& text) {
  for (int i = 0; i <= static_cast<int>(Collective::remove_process_set); ++i) {
    if (text == negotiate::name(static_cast<Collective>(i))) return static_cast<Collective>(i);
  }
  raise(ErrorKind::config, "named collectives: unknown kind '", text, "'");
}

negotiate::Aggregate reduction_of(int op) {
  GOSSAMER_CHECK(op >= 0 && op <= static_cast<int>(negotiate::Aggregate::product), ErrorKind::config,
                 "named collectives: op must be 0 (Average) to 5 (Product), got ", op);
  return static_cast<negotiate::Aggregate>(op);
}

// A Python function for threads without the GIL, which may also drop the last reference to it. An exception in it is
// printed as unraisable.
template <class Argument, class Convert>
std::function<void(const Argument&)> callback(const py::object& function, Convert convert) {
  if (function.is_none()) return nullptr;
  std::shared_ptr<py::object> kept(new py::object(function), [](py::object* object) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [kept, convert](const Argument& argument) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    try {
      (*kept)(*convert(argument));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable(*kept);
    }
  };
}

const char* name(negotiate::Phase phase) {
  switch (phase) {
    case negotiate::Phase::submitted: return "submitted";
    case negotiate::Phase::rank_ready: return "rank_ready";
    case negotiate::Phase::agreed: return "agreed";
    case negotiate::Phase::executing: return "executing";
    case negotiate::Phase::done: return "done";
  }
  return "";
}

std::shared_ptr<NamedCollectives> open(c10::intrusive_ptr<c10d::Backend> control, Devices devices,
                                       std::vector<int> ranks, CommunicatorPtr near, int64_t fusion_bytes,
                                       bool fuse_groups, int cache_capacity, int64_t window_us,
                                       double stall_warning_s, double stall_shutdown_s,
                                       const py::object& on_stall, const py::object& on_event) {
  negotiate::Options options;
  options.ranks = std::move(ranks);
  options.fusing = {fusion_bytes, fuse_groups};
  options.cache_capacity = cache_capacity;
  options.window = std::chrono::microseconds(window_us);
  options.stall.warning_s = stall_warning_s;
  options.stall.shutdown_s = stall_shutdown_s;
  options.stall.report = callback<std::vector<negotiate::Stalled>>(
      on_stall, [](const std::vector<negotiate::Stalled>& stalled) { return py::make_tuple(stalled); });
  options.trace = callback<negotiate::Moment>(on_event, [](const negotiate::Moment& event) {
    const auto seconds = std::chrono::duration<double>(event.time.time_since_epoch()).count();
    return py::make_tuple(name(event.phase), event.name, event.rank, seconds);
  });
  const py::gil_scoped_release release;
  return std::shared_ptr<NamedCollectives>(
      new NamedCollectives(std::move(control), std::move(devices), std::move(near), std::move(options)),
      [](NamedCollectives* collectives) {
        const WithoutGil without_gil;  // the negotiation's thread may want it
        delete collectives;
      });
}

void wait(const Ticket& ticket) {
  while (true) {
    {
      const py::gil_scoped_release release;
      if (ticket.wait_for(kLookForSignals)) return ticket.settle();
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

}  // namespace

void bind_named(py::module_& module) {
  py::class_<negotiate::Stalled>(module, "Stalled")
      .def_readonly("name", &negotiate::Stalled::name)
      .def_readonly("seconds", &negotiate::Stalled::seconds)
      .def_readonly("submitted", &negotiate::Stalled::submitted)
      .def_readonly("missing", &negotiate::Stalled::missing)
      .def_readonly("call_site", &negotiate::Stalled::call_site);
  py::class_<Ticket, TicketPtr>(module, "NamedOperation")
      .def_property_readonly("name", &Ticket::name)
      .def("done", &Ticket::done)
      .def("wait", &wait)
      .def_property_readonly("output", [](Ticket& ticket) { return ticket.data().output; })
      .def_property_readonly("received_splits", [](Ticket& ticket) { return ticket.data().received_splits; })
      .def_property_readonly("value", &Ticket::value);
  py::class_<NamedCollectives, std::shared_ptr<NamedCollectives>>(module, "NamedCollectives")
      .def(py::init(&open), py::arg("control"), py::arg("devices"), py::arg("ranks"), py::kw_only(),
           py::arg("near") = nullptr, py::arg("fusion_bytes"), py::arg("fuse_groups"),
           py::arg("cache_capacity"), py::arg("window_us"), py::arg("stall_warning_s"),
           py::arg("stall_shutdown_s"), py::arg("on_stall"), py::arg("on_event"))
      .def_property_readonly("rank", &NamedCollectives::rank)
      .def_property_readonly("size", &NamedCollectives::size)
      .def_property_readonly("ranks", &NamedCollectives::ranks)
      .def(
          "submit",
          [](NamedCollectives& self, const std::string& kind, std::vector<at::Tensor> tensors,
             std::vector<std::string> names, bool in_place, int op, int root, double prescale,
             double postscale, std::optional<std::vector<int64_t>> splits, std::optional<std::string> group,
             std::string call_site) {
            const py::gil_scoped_release release;
            return self.submit({kind_of(kind), std::move(tensors), std::move(names), in_place,
                                reduction_of(op), root, prescale, postscale, std::move(splits),
                                std::move(group), std::move(call_site)});
          },
          // All arguments may be positional: keyword arguments make the call a quarter slower.
          py::arg("kind"), py::arg("tensors"), py::arg("names"), py::arg("in_place") = false,
          py::arg("op") = 1, py::arg("root") = 0, py::arg("prescale") = 1.0, py::arg("postscale") = 1.0,
          py::arg("splits") = py::none(), py::arg("group") = py::none(), py::arg("call_site") = "")
      .def(
          "barrier",
          [](NamedCollectives& self, const std::string& site) {
            return self.submit(Collective::barrier, {}, site);
          },
          py::arg("call_site") = "", Release())
      .def(
          "join",
          [](NamedCollectives& self, const std::string& site) {
            return self.submit(Collective::join, {}, site);
          },
          py::arg("call_site") = "", Release())
      .def("refuse_join", &NamedCollectives::refuse_join, py::arg("reason"), py::arg("call_site") = "",
           Release())
      .def(
          "add_process_set",
          [](NamedCollectives& self, std::vector<int64_t> ranks, const std::string& site) {
            return self.submit(Collective::add_process_set, std::move(ranks), site);
          },
          py::arg("ranks"), py::arg("call_site") = "", Release())
      .def(
          "remove_process_set",
          [](NamedCollectives& self, int64_t id, const std::string& site) {
            return self.submit(Collective::remove_process_set, {id}, site);
          },
          py::arg("id"), py::arg("call_site") = "", Release())
      .def(
          "refuse",
          [](NamedCollectives& self, const std::string& kind, const std::string& name,
             const std::string& reason,
             const std::string& site) { self.refuse(kind_of(kind), name, reason, site); },
          py::arg("kind"), py::arg("name"), py::arg("reason"), py::arg("call_site") = "", Release())
      .def("shutdown", &NamedCollectives::shutdown, Release())
      .def_property_readonly("bytes_sent",
                             [](const NamedCollectives& self) { return self.runner().bytes_sent(); })
      .def_property_readonly("bytes_received",
                             [](const NamedCollectives& self) { return self.runner().bytes_received(); })
      .def("statistics", [](const NamedCollectives& self) {
        const auto counted = self.statistics();
        py::dict all;
        all["submitted"] = counted.submitted;
        all["cached"] = counted.cached;
        all["messages"] = counted.messages;
        all["message_bytes"] = counted.message_bytes;
        all["decisions"] = counted.decisions;
        all["batches"] = counted.batches;
        return all;
      });
  module.def(
      "adasum",
      [](Communicator& comm, const at::Tensor& x, const std::vector<int64_t>& lengths, bool torch_ops) {
        adasum(comm, x, lengths, {nullptr, torch_ops});
      },
      py::arg("comm"), py::arg("x"), py::arg("lengths"), py::arg("torch_ops") = false, Release());
}

}  // namespace gossamer
