// See table.h.
#include "kernels/table.h"

namespace gossamer {

CudaHooks& cuda_hooks() {
  static CudaHooks hooks;
  return hooks;
}

}  // namespace gossamer
