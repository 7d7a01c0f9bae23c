// Tells a device's allocator that a stream uses memory which may be freed while the stream's work is still to run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace gossamer {

// Without it, the allocator gives the memory of a dropped tensor to the next allocation on the stream that it was made on.
inline void record_use_on_current_stream(const at::Tensor& x) {
  if (x.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(x.device().type());
  guard.recordDataPtrOnStream(x.storage().data_ptr(), guard.getStream(x.device()));
}

}  // namespace gossamer
