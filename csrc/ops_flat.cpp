// torch.ops.gossamer: flat/ as tensor operations, on any device that device_kernels.h knows. The engine's buckets call
// the kernels directly; these are for Python: benchmarks, and tests that compare devices.
#include <ATen/DeviceGuard.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "collectives/two_shot.h"
#include "device_kernels.h"
#include "errors.h"

namespace gossamer {
namespace {

// The tensors' places in `flat`, one after another.
std::vector<flat::Segment> segments_of(const char* where, at::TensorList tensors, const at::Tensor& flat) {
  check_argument(flat.dim() == 1 && flat.is_contiguous(), where, ": flat must be a contiguous vector, got ",
                 flat.sizes());
  std::vector<flat::Segment> segments;
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    check_argument(tensor.is_contiguous() && tensor.scalar_type() == flat.scalar_type() &&
                       tensor.device() == flat.device(),
                   where, ": tensors must be contiguous ", flat.scalar_type(), " on ", flat.device(),
                   ", as flat is, got ", tensor.scalar_type(), " ", tensor.sizes(), " with strides ",
                   tensor.strides(), " on ", tensor.device());
    segments.push_back({tensor.data_ptr(), offset, tensor.numel()});
    offset += tensor.numel();
  }
  check_argument(offset == flat.numel(), where, ": flat must hold as many elements as the tensors, ", offset,
                 ", got ", flat.numel());
  return segments;
}

void gather_(at::TensorList tensors, const at::Tensor& flat, double scale) {
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard guard(at::device_of(flat));
  const auto segments = segments_of("gather", tensors, flat);
  device_kernels(flat.device().type())
      .gather(to_dtype(flat.scalar_type(), "gather"), segments.data(), static_cast<int64_t>(segments.size()),
              flat.data_ptr(), scale);
}

void scatter_(at::TensorList tensors, const at::Tensor& flat, double scale) {
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard guard(at::device_of(flat));
  const auto segments = segments_of("scatter", tensors, flat);
  device_kernels(flat.device().type())
      .scatter(to_dtype(flat.scalar_type(), "scatter"), segments.data(),
               static_cast<int64_t>(segments.size()), flat.data_ptr(), scale);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gossamer, library) {
  library.def("gather_(Tensor[] tensors, Tensor(a!) flat, float scale) -> ()");
  library.def("scatter_(Tensor(a!)[] tensors, Tensor flat, float scale) -> ()");
}

TORCH_LIBRARY_IMPL(gossamer, CompositeExplicitAutograd, library) {
  library.impl("gather_", gather_);
  library.impl("scatter_", scatter_);
}

}  // namespace gossamer
