// Checks of what c10d hands to an operation; each throws PythonError(config) with the values. `where` is the operation's
// name. Used by reductions.cpp and moves.cpp inside GossamerBackend::checked, which tells the other ranks.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "errors.h"

namespace gossamer {

inline void require_cpu(const char* where, const at::Tensor& tensor) {
  check_argument(tensor.is_cpu() && tensor.layout() == at::kStrided, where,
                 ": tensors must be dense and on the CPU, got ", tensor.layout(), " on ", tensor.device());
}

// Where an operation writes.
inline void require_disjoint(const char* where, const at::Tensor& tensor) {
  check_argument(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, where,
                 ": a tensor that is written must not hold one element in several places, got strides ",
                 tensor.strides(), " of sizes ", tensor.sizes());
}
inline void require_disjoint(const char* where, const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) require_disjoint(where, tensor);
}

inline const at::Tensor& only(const char* where, const std::vector<at::Tensor>& tensors) {
  check_argument(tensors.size() == 1, where, ": one tensor a call, got ", tensors.size());
  require_cpu(where, tensors[0]);
  return tensors[0];
}

inline void require_root(const char* where, int64_t root, int size) {
  check_argument(root >= 0 && root < size, where, ": root must be in [0, ", size, "), got ", root);
}

// One tensor a rank, all like the first in size and dtype.
inline void require_parts(const char* where, const std::vector<at::Tensor>& parts, const at::Tensor& like,
                          int size) {
  check_argument(static_cast<int>(parts.size()) == size, where, ": one tensor a rank, ", size,
                 " in all, got ", parts.size());
  for (const auto& part : parts) {
    require_cpu(where, part);
    check_argument(part.numel() == like.numel() && part.scalar_type() == like.scalar_type(), where,
                   ": tensors must have equal sizes and dtypes, got ", like.numel(), " ", like.scalar_type(),
                   " and ", part.numel(), " ", part.scalar_type());
  }
}

inline void require_whole(const char* where, const at::Tensor& whole, const at::Tensor& part, int size) {
  require_cpu(where, whole);
  require_cpu(where, part);
  check_argument(whole.numel() == part.numel() * size && whole.scalar_type() == part.scalar_type(), where,
                 ": the large tensor must hold ", size, " times the small one's elements in its dtype, got ",
                 whole.numel(), " ", whole.scalar_type(), " and ", part.numel(), " ", part.scalar_type());
}

}  // namespace gossamer
