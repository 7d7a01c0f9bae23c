// See work.h.
#include "engine/work.h"

#include <utility>

#include "errors.h"

namespace gossamer {

void NativeAllReduce::run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) {
  if (comm.size() > 1) comm.all_reduce(bucket->flat("grad"), ReduceOp::sum)->wait();
}

void CodecAllReduce::run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) {
  two_shot::all_reduce(comm, codec_, bucket->flat("grad"), average_ ? 1.0 / comm.size() : 1.0, scratch_);
}

PythonWork::PythonWork(pybind11::object callable)
    : callable_(new pybind11::object(std::move(callable)), [](pybind11::object* object) {
        if (!Py_IsInitialized()) return;  // the interpreter took its objects with it
        pybind11::gil_scoped_acquire gil;
        delete object;
      }) {}

void PythonWork::run(Communicator&, const std::shared_ptr<Bucket>& bucket) {
  pybind11::gil_scoped_acquire gil;
  try {
    (*callable_)(bucket);
  } catch (pybind11::error_already_set& error) {
    // python_error carries the exception across threads and out of autograd without needing the GIL.
    error.restore();
    python_error carried;
    carried.persist();
    throw carried;
  }
}

}  // namespace gossamer
