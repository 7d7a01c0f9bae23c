// What backend/gloo.h declares.
#include "backend/gloo.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

namespace gossamer {

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout) {
  const pybind11::gil_scoped_acquire gil;
  const auto make = pybind11::module_::import("torch.distributed").attr("ProcessGroupGloo");
  return make(store, rank, size, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
}

}  // namespace gossamer
