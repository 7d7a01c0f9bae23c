// See scratch.h.
#include "route/scratch.h"

#include <ATen/ops/empty.h>

namespace gossamer {

at::Tensor Scratch::take(at::Tensor& slot, int64_t bytes, at::Device device) {
  if (!slot.defined() || slot.device() != device || slot.numel() < bytes) {
    slot = at::Tensor();  // free the old memory before asking for the new
    slot = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  return slot.narrow(0, 0, bytes);
}

}  // namespace gossamer
