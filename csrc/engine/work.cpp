// See work.h.
#include "engine/work.h"

#include <utility>

#include "errors.h"

namespace gossamer {

void NativeAllReduce::run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) {
  if (comm.size() > 1) comm.all_reduce(bucket->flat("grad"), ReduceOp::sum)->wait();
}

void CodecAllReduce::run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) {
  const at::Tensor grad = bucket->flat("grad");
  if (!codec::keeps_zeros(codec_.spec(grad.scalar_type()))) bucket->clear_padding();  // of the step before
  // Any number that differs from bucket to bucket and from step to step.
  const uint64_t nonce =
      codec::make_key(0, static_cast<uint64_t>(bucket->step()), 0, static_cast<uint64_t>(bucket->index()));
  two_shot::all_reduce(comm, codec_, grad, average_ ? 1.0 / comm.size() : 1.0, scratch_, nonce);
}

PythonCallable::PythonCallable(pybind11::object callable)
    : callable_(new pybind11::object(std::move(callable)), [](pybind11::object* object) {
        if (!Py_IsInitialized()) return;  // the interpreter took its objects with it
        pybind11::gil_scoped_acquire gil;
        delete object;
      }) {}

}  // namespace gossamer
