// Python's view of the engine: buckets, works, and the engine with its parts.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <array>
#include <utility>
#include <vector>

#include "backend/gil.h"
#include "engine/engine.h"
#include "engine/owners.h"
#include "python/bindings.h"
#include "python/callable.h"

namespace py = pybind11;

namespace gossamer {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;

// torch's view of a bucket, for communication hooks. `buffer` holds the gradients one after the other, without padding.
c10d::GradBucket grad_bucket(const Bucket& bucket, at::Tensor buffer, size_t count) {
  std::vector<size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> sizes;  // of the parameters, which outlive it
  for (const auto& param : bucket.params()) {
    offsets.push_back(offsets.empty() ? 0 : offsets.back() + lengths.back());
    lengths.push_back(static_cast<size_t>(param.numel()));
    sizes.push_back(param.sizes());
  }
  return c10d::GradBucket(static_cast<size_t>(bucket.index()), count, std::move(buffer), std::move(offsets),
                          std::move(lengths), std::move(sizes), bucket.params(), std::nullopt);
}

void bind_buckets(py::module_& module) {
  py::class_<Placement>(module, "Placement")
      .def(py::init([](const std::vector<std::vector<std::array<int64_t, 3>>>& pieces, int64_t numel) {
             Placement placement{{}, numel};
             for (const auto& own : pieces) {
               placement.pieces.emplace_back();
               for (const auto& [begin, length, offset] : own)
                 placement.pieces.back().push_back({begin, length, offset});
             }
             return placement;
           }),
           py::arg("pieces"), py::arg("numel"))
      .def_static("in_turn", &Placement::in_turn, py::arg("params"), py::arg("block"), py::arg("alignment"))
      .def_readonly("numel", &Placement::numel);
  py::class_<Bucket, std::shared_ptr<Bucket>>(module, "Bucket")
      .def(py::init<int64_t, std::vector<int64_t>, std::vector<at::Tensor>, std::vector<std::string>,
                    Placement, std::optional<at::ScalarType>>(),
           py::arg("index"), py::arg("indices"), py::arg("params"), py::arg("names"), py::arg("placement"),
           py::arg("dtype") = py::none())
      .def(
          "add_field",
          [](Bucket& bucket, const std::string& field, Communicator* comm,
             std::optional<at::ScalarType> dtype) { return bucket.add_field(field, comm, dtype); },
          py::arg("field"), py::arg("comm") = nullptr, py::arg("dtype") = py::none(), Release())
      .def("clear_padding", &Bucket::clear_padding, py::arg("field"), Release())
      .def("adopt_weights", &Bucket::adopt_weights, Release())
      .def("weights_held", &Bucket::weights_held, Release())
      .def_property_readonly("strayed", &Bucket::strayed)
      .def("set_aside", &Bucket::set_aside, py::arg("field"), Release())
      .def("value", &Bucket::value, py::arg("field"), py::arg("position"), Release())
      .def("set_value", &Bucket::set_value, py::arg("field"), py::arg("position"), py::arg("value"),
           Release())
      .def_property_readonly("index", &Bucket::index)
      .def_property_readonly("numel", &Bucket::numel)
      .def_property_readonly("bytes", &Bucket::bytes)
      .def_property_readonly("params", &Bucket::params)
      .def_property_readonly("names", &Bucket::names)
      .def_property_readonly("param_indices", &Bucket::indices)
      .def_property_readonly("device", &Bucket::device)
      .def_property_readonly("dtype", &Bucket::dtype)
      .def_property_readonly("step", &Bucket::step)
      .def_property_readonly("fields", &Bucket::fields)
      .def("flat", &Bucket::flat, py::arg("field") = "grad")
      .def(
          "views",
          [](const Bucket& bucket, const std::string& field) {
            // Tensors of the caller's own, as in Bucket::give_gradient: an optimizer's state holds some of them.
            std::vector<at::Tensor> own;
            for (const auto& view : bucket.views(field)) own.push_back(view.detach());
            return own;
          },
          py::arg("field") = "grad")
      .def("__repr__", &Bucket::describe);

  module.def("grad_bucket", &grad_bucket, py::arg("bucket"), py::arg("buffer"), py::arg("count"));

  py::class_<BucketWork, std::shared_ptr<BucketWork>>(module, "BucketWork");
  py::class_<NativeAllReduce, BucketWork, std::shared_ptr<NativeAllReduce>>(module, "NativeAllReduce")
      .def(py::init<bool>(), py::arg("average"));
  py::class_<ScaledAllReduce, BucketWork, std::shared_ptr<ScaledAllReduce>>(module, "ScaledAllReduce")
      .def(py::init<double, double>(), py::arg("prescale"), py::arg("postscale"));
  py::class_<CodecAllReduce, BucketWork, std::shared_ptr<CodecAllReduce>>(module, "CodecAllReduce")
      .def(py::init<CodecChoice, bool>(), py::arg("codec"), py::arg("average"));
  py::class_<TimedWork, BucketWork, std::shared_ptr<TimedWork>>(module, "TimedWork")
      .def(py::init<std::shared_ptr<BucketWork>>(), py::arg("work"))
      .def("take_seconds", &TimedWork::take_seconds, Release());
  py::class_<NoWork, BucketWork, std::shared_ptr<NoWork>>(module, "NoWork").def(py::init<>());
  py::class_<AgreeOnFinite, BucketWork, std::shared_ptr<AgreeOnFinite>>(module, "AgreeOnFinite")
      .def(py::init<>())
      .def("run", &AgreeOnFinite::run, py::arg("comm"), py::arg("bucket"), Release());
  py::class_<PythonWork, BucketWork, std::shared_ptr<PythonWork>>(module, "PythonWork")
      .def(py::init<py::object>(), py::arg("callable"));

  py::class_<Executor>(module, "Executor")
      .def(py::init<at::Device, CommunicatorPtr>(), py::arg("device"), py::arg("until_done") = nullptr)
      .def(
          "submit",
          [](Executor& executor, py::object task) {
            auto call = std::make_shared<PythonCallable>(std::move(task));
            const py::gil_scoped_release release;
            return executor.submit_behind_current([call = std::move(call)] { (*call)(); });
          },
          py::arg("task"))
      .def("busy", &Executor::busy, Release())
      .def("running", &Executor::running, Release())
      .def(
          "wait_until_run",
          [](Executor& executor, uint64_t last) { executor.wait_until_run(raise_interrupt, last); },
          py::arg("last"), Release())
      .def_property_readonly("recorder", &Executor::shared_recorder)
      .def(
          "wait",
          [](Executor& executor, std::optional<uint64_t> last) { executor.wait(raise_interrupt, last); },
          py::arg("last") = py::none(), Release())
      .def("stop", &Executor::stop, Release())
      .def("finish", &Executor::finish, Release());
}

// The parts of an engine, as its attributes: a reference to a part keeps the engine alive.
void bind_parts(py::module_& module) {
  py::class_<Worker>(module, "Worker")
      .def(
          "submit",
          [](Worker& worker, py::object task, const std::string& what) {
            auto call = std::make_shared<PythonCallable>(std::move(task));
            const py::gil_scoped_release release;
            worker.submit([call = std::move(call)] { (*call)(); }, what);
          },
          py::arg("task"), py::arg("what"))
      .def("wait", &Worker::wait, Release())
      .def("fails_with", &Worker::fails_with, py::arg("comm"))
      .def("check_alive", &Worker::check_alive)
      .def("give_up", &Worker::give_up, py::arg("why"), py::arg("announce"), Release());
  py::class_<Hooks>(module, "Hooks")
      .def("set_static_graph", &Hooks::set_static_graph)
      .def("begin_forward", &Hooks::begin_forward, Release())
      .def("survey", &Hooks::survey, Release())
      .def_property_readonly("left_out", &Hooks::left_out)
      .def_property_readonly("left_out_somewhere", &Hooks::left_out_somewhere);
  py::class_<Flight>(module, "Flight")
      .def("keep_gradients", &Flight::keep_gradients, py::arg("keep"), Release())
      .def("kept_gradients", &Flight::kept_gradients, Release())
      .def("keep_for_redo", &Flight::keep_for_redo, py::arg("keep"), Release())
      .def("before", [](const Flight& flight) {
        std::map<int64_t, std::pair<std::map<std::string, at::Tensor>, bool>> before;
        for (auto& [index, each] : flight.before()) before[index] = {each.fields, each.done};
        return before;
      });
  py::class_<Ending>(module, "Ending");
  py::class_<Lockstep, Ending>(module, "Lockstep")
      .def(
          "set_on_end",
          [](Lockstep& lockstep, const std::optional<py::function>& on_end) {
            if (!on_end) return lockstep.set_on_end(nullptr);
            lockstep.set_on_end([end = PythonCallable(*on_end)] { end(); });
          },
          py::arg("on_end"))
      .def(
          "set_on_lost",
          [](Lockstep& lockstep, py::function on_lost) {
            lockstep.set_on_lost([lost = PythonCallable(std::move(on_lost))](
                                     bool counted, const std::string& why) { return lost(counted, why); });
          },
          py::arg("on_lost"))
      .def_property("wish", &Lockstep::wish, &Lockstep::set_wish)
      .def_property_readonly("wished", &Lockstep::wished)
      .def_property("optimizer_steps", &Lockstep::optimizer_steps, &Lockstep::set_optimizer_steps);
  py::class_<Alone, Ending>(module, "Alone")
      .def(
          "set_listener",
          [](Alone& alone, py::function on_gradient, py::function on_end) {
            alone.set_listener(
                {[call = PythonCallable(std::move(on_gradient))](int64_t index) { call(index); },
                 [call = PythonCallable(std::move(on_end))](std::vector<int64_t> missing) {
                   call(std::move(missing));
                 }});
          },
          py::arg("on_gradient"), py::arg("on_end"));
  py::class_<Rounds, Ending>(module, "Rounds")
      .def("set_passes", &Rounds::set_passes, py::arg("passes"), Release())
      .def_property_readonly("under_way", &Rounds::under_way);
  py::class_<Join>(module, "Join")
      .def(
          "start",
          [](Join& join, bool mean_of_active, bool raise_early, py::object on_begin) {
            std::function<bool()> begin;
            if (!on_begin.is_none()) begin = PythonCallable(std::move(on_begin));
            const py::gil_scoped_release release;
            join.start(mean_of_active, raise_early, std::move(begin));
          },
          py::arg("mean_of_active"), py::arg("raise_early"), py::arg("on_begin") = py::none())
      .def("end", &Join::end, Release())
      .def("count", &Join::count, py::arg("samples"), Release())
      .def_property_readonly("ended_early", &Join::ended_early);
  module.def("flat_memory_of", &flat_memory_of, py::arg("weight"));
  module.def("inside_backward", &inside_backward);
  module.def("inside_backward_of_all", &inside_backward_of_all);
}

void bind_whole(py::module_& module) {
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init([](CommunicatorPtr comm, CommunicatorPtr control, std::vector<at::Tensor> params,
                       std::vector<std::string> names, py::function on_late, py::function on_order) {
             return std::make_shared<Engine>(
                 std::move(comm), std::move(control), std::move(params), std::move(names),
                 [late = PythonCallable(std::move(on_late))] { late(); },
                 [order = PythonCallable(std::move(on_order))](std::vector<int64_t> indices) {
                   order(std::move(indices));
                 });
           }),
           py::arg("comm"), py::arg("control"), py::arg("params"), py::arg("names"), py::arg("on_late"),
           py::arg("on_order"))
      .def("clear_buckets", &Engine::clear_buckets, Release())
      .def("append_bucket", &Engine::append_bucket, py::arg("bucket"), py::arg("work"), Release())
      .def("resume", &Engine::resume, py::arg("step"), py::arg("optimizer_steps"))
      .def("close", &Engine::close, py::arg("why") = "")
      .def_property_readonly("closed", [](Engine& engine) { return engine.parts().worker.closed(); })
      .def_property("sync", &Engine::sync, &Engine::set_sync)
      .def("set_output_sync", &Engine::set_output_sync, py::arg("sync"))
      .def("end_by", &Engine::end_by, py::arg("ending"), Release())
      .def("output_gradient", &Engine::output_gradient, Release())
      .def(
          "set_on_begin",
          [](Engine& engine, py::function on_begin) {
            engine.set_on_begin([call = PythonCallable(std::move(on_begin))] { call(); });
          },
          py::arg("on_begin"))
      .def("abandon", &Engine::abandon, Release())
      .def("end_round", &Engine::end_round, Release())
      .def("shadow", &Engine::shadow, Release())
      .def("redo", &Engine::redo, Release())
      .def("capture_refusal", &Engine::capture_refusal, Release())
      .def("check_capture", &Engine::check_capture, Release())
      .def_property_readonly("worker", [](Engine& engine) -> Worker& { return engine.parts().worker; })
      .def_property_readonly("hooks", [](Engine& engine) -> Hooks& { return engine.parts().hooks; })
      .def_property_readonly("flight", [](Engine& engine) -> Flight& { return engine.parts().flight; })
      .def_property_readonly("join", [](Engine& engine) -> Join& { return engine.parts().join; })
      .def_property_readonly("lockstep",
                             [](Engine& engine) -> Lockstep& { return engine.endings().lockstep; })
      .def_property_readonly("alone", [](Engine& engine) -> Alone& { return engine.endings().alone; })
      .def_property_readonly("rounds", [](Engine& engine) -> Rounds& { return engine.endings().rounds; })
      // What the stall watch asks of every object that it watches.
      .def_property_readonly("step", [](Engine& engine) { return engine.parts().worker.step(); })
      .def_property_readonly(
          "recorder", [](Engine& engine) { return engine.parts().worker.executor().shared_recorder(); })
      .def("activity",
           [](Engine& engine) { return activity_of(engine.parts().worker.executor().recorder()); })
      .def(
          "tell_stall",
          [](Engine& engine, const std::string& facts, bool stop) {
            engine.parts().worker.tell_stall(facts, stop);
          },
          py::arg("facts"), py::arg("stop"), Release());
  module.def("owners_of", &owners_of, py::arg("params"));
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_buckets(module);
  bind_parts(module);
  bind_whole(module);
}

}  // namespace gossamer
