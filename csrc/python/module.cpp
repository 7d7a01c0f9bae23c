// gossamer._C: the native classes as Python sees them. Only binding; the Python faces check and document arguments.
// Everything that can block releases the GIL.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>
#include <utility>
#include <vector>

#include "collectives/two_shot.h"
#include "comm/by_hosts.h"
#include "comm/c10d.h"
#include "comm/symmetric.h"
#include "kernels/table.h"
#include "optim/optim.h"
#include "python/bindings.h"
#include "python/callable.h"
#include "python/errors.h"
#include "route/peers.h"
#include "route/route.h"

namespace py = pybind11;
using namespace gossamer;

namespace {

using Release = py::call_guard<py::gil_scoped_release>;
using KeepComm = py::keep_alive<0, 1>;  // a pending operation needs its communicator

void translate_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (PythonError& error) {
      PyErr_SetString(error.python_type(), error.what());
    } catch (const Error& error) {
      PyErr_SetString(python_error_type(error.kind), error.what());
    } catch (::python_error& error) {
      error.restore();
    }
  });
}

// `memory`: the same ranks over the backend "gossamer", which shares the host's memory between them; null: torch shares the
// devices'.
template <class Kind>
CommunicatorPtr over_memory(const CommunicatorPtr& other, CommunicatorPtr control,
                            const CommunicatorPtr& memory, c10::intrusive_ptr<c10d::Store> store,
                            int64_t timeout_ms) {
  c10::intrusive_ptr<c10d::Backend> backend;
  if (const auto c10d = std::dynamic_pointer_cast<C10dCommunicator>(memory)) backend = c10d->backend();
  auto group = std::make_unique<PeerGroup>(std::move(store), other->rank(), other->size(), other->device(),
                                           backend, timeout_ms);
  return std::make_shared<Kind>(other, std::move(control), std::move(group));
}

void bind_communicator(py::module_& module) {
  py::class_<Pending>(module, "Pending").def("wait", &Pending::wait, Release());
  py::enum_<ReduceOp>(module, "ReduceOp")
      .value("SUM", ReduceOp::sum)
      .value("MAX", ReduceOp::max)
      .value("MIN", ReduceOp::min)
      .value("PRODUCT", ReduceOp::product);
  py::class_<Communicator, CommunicatorPtr>(module, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("device", &Communicator::device)
      .def_property_readonly("bytes_sent", &Communicator::bytes_sent)
      .def_property_readonly("bytes_received", &Communicator::bytes_received)
      .def_property_readonly("chunks", &Communicator::chunks)
      .def_property_readonly("shares_memory", &Communicator::shares_memory)
      .def("all_reduce", &Communicator::all_reduce, py::arg("x"), py::arg("op") = ReduceOp::sum, KeepComm(),
           Release())
      .def("reduce_scatter", &Communicator::reduce_scatter, py::arg("out"), py::arg("x"),
           py::arg("op") = ReduceOp::sum, KeepComm(), Release())
      .def("all_gather", &Communicator::all_gather, py::arg("out"), py::arg("x"), KeepComm(), Release())
      .def("all_to_all", &Communicator::all_to_all, py::arg("out"), py::arg("x"), KeepComm(), Release())
      .def("all_to_all_unequal", &Communicator::all_to_all_unequal, py::arg("out"), py::arg("x"),
           py::arg("out_bytes"), py::arg("x_bytes"), KeepComm(), Release())
      .def("broadcast", &Communicator::broadcast, py::arg("x"), py::arg("source") = 0, KeepComm(), Release())
      .def(
          "exchange",
          [](Communicator& comm, const at::Tensor& out, const at::Tensor& x, int to, int source) {
            return comm.exchange({{out, x, to, source}});
          },
          py::arg("out"), py::arg("x"), py::arg("to"), py::arg("source"), KeepComm(), Release())
      .def(
          "exchange_all",
          [](Communicator& comm, const std::vector<std::tuple<at::Tensor, at::Tensor, int, int>>& swaps) {
            std::vector<Swap> all;
            for (const auto& [out, x, to, source] : swaps) all.push_back({out, x, to, source});
            return comm.exchange(all);
          },
          py::arg("swaps"), KeepComm(), Release())
      .def_property_readonly("queues_on_device", &Communicator::queues_on_device)
      .def("wait_on_host", &Communicator::wait_on_host, py::arg("timeout"))
      .def("announce_failure", &Communicator::announce_failure, py::arg("what") = Communicator::kFailed,
           Release())
      .def("allocate", &Communicator::allocate, py::arg("bytes"), Release());
  module.def(
      "c10d_communicator",
      [](c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
         std::optional<c10::intrusive_ptr<c10d::Store>> store, std::string name,
         std::vector<int> ranks) -> CommunicatorPtr {
        return std::make_shared<C10dCommunicator>(std::move(backend), device,
                                                  store ? *store : c10::intrusive_ptr<c10d::Store>(),
                                                  std::move(name), std::move(ranks));
      },
      py::arg("backend"), py::arg("device"), py::arg("store"), py::arg("name"),
      py::arg("ranks") = std::vector<int>());
  py::class_<ByHosts, std::shared_ptr<ByHosts>, Communicator>(module, "ByHosts")
      .def(py::init<CommunicatorPtr, CommunicatorPtr, CommunicatorPtr, std::vector<std::vector<int>>,
                    CommunicatorPtr>(),
           py::arg("world"), py::arg("inside"), py::arg("across"), py::arg("hosts"),
           py::arg("back") = py::none(), py::keep_alive<1, 2>())
      .def_property_readonly("world", &ByHosts::world)
      .def_property_readonly("hosts", &ByHosts::hosts)
      .def_property_readonly("bytes_across", &ByHosts::bytes_across);
  module.def(
      "symmetric_communicator",
      [](const CommunicatorPtr& other, CommunicatorPtr control, c10::intrusive_ptr<c10d::Store> store,
         int64_t timeout_ms) -> CommunicatorPtr {
        const CommunicatorPtr memory = other->device().is_cpu() ? other : nullptr;
        return over_memory<SymmetricCommunicator>(other, std::move(control), memory, std::move(store),
                                                  timeout_ms);
      },
      py::arg("other"), py::arg("control"), py::arg("store"), py::arg("timeout_ms"), Release());
  module.def(
      "host_memory_communicator",
      [](const CommunicatorPtr& other, const CommunicatorPtr& host, c10::intrusive_ptr<c10d::Store> store,
         int64_t timeout_ms) -> CommunicatorPtr {
        return over_memory<HostMemoryCommunicator>(other, host, host, std::move(store), timeout_ms);
      },
      py::arg("other"), py::arg("host"), py::arg("store"), py::arg("timeout_ms"), Release());
  module.def(
      "unreached_peers",
      [](const CommunicatorPtr& comm) {
        const auto own = std::dynamic_pointer_cast<SymmetricCommunicator>(comm);
        check_argument(own != nullptr, "unreached_peers: needs a communicator over symmetric memory");
        return own->unreached_peers();
      },
      py::arg("comm"), Release());
}

void bind_collectives(py::module_& module) {
  py::class_<CodecChoice>(module, "CodecChoice")
      .def(py::init([](int64_t kind, int64_t block, bool stochastic, uint64_t seed) {
             return CodecChoice{static_cast<codec::Kind>(kind), block, stochastic, seed};
           }),
           py::arg("kind"), py::arg("block"), py::arg("stochastic") = false, py::arg("seed") = 0)
      .def_property_readonly("is_divisible", &CodecChoice::is_divisible)
      // The key of an encoding outside of collectives; signed, as torch.ops.gossamer takes it.
      .def_property_readonly("key", [](const CodecChoice& codec) {
        return static_cast<int64_t>(codec.key(0, Phase::alone, 0));
      });
  module.def(
      "all_reduce",
      [](Communicator& comm, const CodecChoice& codec, const at::Tensor& x, double scale, uint64_t nonce,
         const std::optional<at::Tensor>& error) {
        Scratch scratch;
        if (error) {
          two_shot::all_reduce_with_error(comm, codec, x, scale, scratch, nonce, *error);
        } else {
          two_shot::all_reduce(comm, codec, x, scale, scratch, nonce);
        }
      },
      py::arg("comm"), py::arg("codec"), py::arg("x"), py::arg("scale"), py::arg("nonce") = 0,
      py::arg("error") = py::none(), Release());
  module.def("sum_in_place", &sum_in_place, py::arg("comm"), py::arg("x"), py::arg("scale"), Release());
  module.def("swap_rows", &swap_rows, py::arg("comm"), py::arg("out"), py::arg("x"), Release());
  module.def("gather_rows", &gather_rows, py::arg("comm"), py::arg("out"), py::arg("x"), Release());
  module.def("piece_bytes", [](Communicator& comm) { return Route::of(comm).pace().piece_bytes(); });
  // Returns false, and does nothing, if x is not contiguous.
  module.def(
      "sum",
      [](Communicator& comm, const at::Tensor& x) {
        if (!x.is_contiguous()) return false;
        Scratch scratch;
        two_shot::all_reduce(comm, x.requires_grad() ? x.detach() : x, scratch);
        return true;
      },
      py::arg("comm"), py::arg("x"), Release());
  // across(communicator, part, scale, error) replaces part by scale * its sum over the hosts.
  module.def(
      "sum_by_hosts",
      [](ByHosts& comm, const at::Tensor& x, double scale, int64_t block,
         const std::optional<at::Tensor>& error, const py::function& across) {
        const PythonCallable call(across);
        const py::gil_scoped_release release;
        const auto carry = [&](Communicator& level, const at::Tensor& part, double factor,
                               const at::Tensor& own, const Around& around) {
          const auto whole = [&part](const Around::Part& all) {
            if (all) all(part.numel(), 0, part.numel());
          };
          whole(around.before);
          call(std::ref(level), part, factor, own.defined() ? std::make_optional(own) : std::nullopt);
          whole(around.after);
        };
        sum_by_hosts(comm, x, scale, block, error.value_or(at::Tensor()), carry);
      },
      py::arg("comm"), py::arg("x"), py::arg("scale"), py::arg("block"), py::arg("error"), py::arg("across"));
  module.def(
      "reduce_scatter",
      [](Communicator& comm, const CodecChoice& codec, const at::Tensor& out, const at::Tensor& x,
         double scale, uint64_t nonce) {
        Scratch scratch;
        two_shot::reduce_scatter(comm, codec, out, x, scale, scratch, nonce);
      },
      py::arg("comm"), py::arg("codec"), py::arg("out"), py::arg("x"), py::arg("scale"), py::arg("nonce") = 0,
      Release());
  module.def(
      "all_gather",
      [](Communicator& comm, const CodecChoice& codec, const at::Tensor& out, const at::Tensor& x,
         uint64_t nonce) {
        Scratch scratch;
        two_shot::all_gather(comm, codec, out, x, scratch, nonce);
      },
      py::arg("comm"), py::arg("codec"), py::arg("out"), py::arg("x"), py::arg("nonce") = 0, Release());
  module.def("instruction_set", [] { return std::string(codec::kernels().name); });
  module.def("select_instruction_set", [](const std::string& name) {
    return codec::select_kernels(name.c_str()) && optim::select_kernels(name.c_str());
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  translate_errors();
  bind_communicator(module);
  bind_collectives(module);
  bind_aside(module);
  bind_observe(module);
  bind_engine(module);
  bind_comm_hook(module);
  bind_backend(module);
  bind_named(module);
  module.attr("with_cuda") = cuda_hooks().kernels != nullptr;
}
