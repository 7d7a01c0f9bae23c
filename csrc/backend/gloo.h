// Makes torch's own Gloo backend through its Python constructor, because the wheels do not ship Gloo's headers. Used for
// what crosses hosts, and for sparse tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace gossamer {

// Collective. Takes the GIL; the caller must hold no lock that a thread with the GIL may wait for.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout);

}  // namespace gossamer
