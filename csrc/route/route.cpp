// See route.h.
#include "route/route.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>

namespace gossamer {

Route& Route::of(Communicator& comm) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!comm.route_) comm.route_ = std::make_shared<Route>();
  return *comm.route_;
}

Route::Shared& Route::shared(Communicator& comm, int64_t row_bytes) {
  if (row_bytes > shared_.row_bytes) {
    shared_ = Shared{};  // free the old memory before asking for the new
    shared_.memory = comm.allocate_shared((comm.size() + 1) * row_bytes);
    shared_.block = comm.peers_of(shared_.memory);
    shared_.row_bytes = row_bytes;
  }
  return shared_;
}

c10::Stream Route::side_stream(const Communicator& comm) {
  if (!side_stream_) {
    const c10::impl::VirtualGuardImpl devices(comm.device().type());
    side_stream_ = devices.getStreamFromGlobalPool(comm.device(), /*isHighPriority=*/true);
  }
  return *side_stream_;
}

}  // namespace gossamer
