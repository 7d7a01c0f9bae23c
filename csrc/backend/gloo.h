// Makes torch's own Gloo backend, whose headers the wheels do not ship: its Python constructor is called. Used for
// what crosses hosts, and for sparse tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace gossamer {

// Collective over the ranks. Takes the GIL; the caller must not hold what a thread with the GIL may wait for.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout);

}  // namespace gossamer
