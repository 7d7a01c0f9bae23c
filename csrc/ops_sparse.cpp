// torch.ops.gossamer: ChunkTopK as tensor operations, whose kernels are in sparse/. Python's codec class calls them.
#include <ATen/DeviceGuard.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "errors.h"
#include "kernels/table.h"
#include "sparse/sparse.h"

namespace gossamer {
namespace {

void check_sparse(bool ok, const char* where, const char* must, const at::Tensor& got) {
  if (ok) return;
  raise_python(ErrorKind::codec, "ChunkTopK.", where, ": ", must, ", got ", got.scalar_type(), " ",
               got.sizes(), " on ", got.device());
}

// True: on CUDA, whose kernels are there. False: on the CPU.
bool is_on_cuda(const at::Tensor& x) {
  if (x.is_cpu()) return false;
  if (x.is_cuda() && sparse::cuda_kernels() != nullptr) return true;
  raise_python(ErrorKind::codec, "ChunkTopK: this installation of gossamer has no kernels for ", x.device(),
               "; for CUDA install the wheel of CUDA kernels, or build gossamer where nvcc is on PATH");
}

int64_t sparse_wire_bytes(int64_t chunk, int64_t kept, int64_t row_numel) {
  return sparse::row_bytes({chunk, kept}, row_numel);
}

at::Tensor sparse_encode(const at::Tensor& x, int64_t chunk, int64_t kept) {
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  const sparse::Format format{chunk, kept};
  check_sparse(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kFloat, "encode",
               "x must be contiguous float32 [rows, row_numel]", x);
  auto wire = at::empty({x.size(0), sparse::row_bytes(format, x.size(1))}, x.options().dtype(at::kByte));
  const auto* from = x.const_data_ptr<float>();
  auto* to = wire.mutable_data_ptr<uint8_t>();
  if (is_on_cuda(x))
    sparse::cuda_kernels()->encode(format, from, x.size(0), x.size(1), to, cuda_hooks().current_stream());
  else
    sparse::kernels().encode(format, from, x.size(0), x.size(1), to);
  return wire;
}

void sparse_decode_add(const at::Tensor& wire, int64_t chunk, int64_t kept, at::Tensor acc) {
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard guard(at::device_of(acc));
  const sparse::Format format{chunk, kept};
  const bool wide = acc.scalar_type() == at::kDouble;
  check_sparse(acc.dim() == 1 && acc.is_contiguous() && (wide || acc.scalar_type() == at::kFloat),
               "decode_add", "acc must be a contiguous vector of float32 or float64", acc);
  check_sparse(wire.dim() == 2 && wire.is_contiguous() && wire.scalar_type() == at::kByte &&
                   wire.device() == acc.device() && wire.size(1) == sparse::row_bytes(format, acc.numel()),
               "decode_add", "wire must be contiguous uint8 rows of acc's elements, on acc's device", wire);
  const auto* from = wire.const_data_ptr<uint8_t>();
  const Dtype dtype = wide ? Dtype::f64 : Dtype::f32;
  if (is_on_cuda(acc))
    sparse::cuda_kernels()->decode_add(format, from, wire.size(0), acc.numel(), dtype, acc.mutable_data_ptr(),
                                       cuda_hooks().current_stream());
  else
    sparse::kernels().decode_add(format, from, wire.size(0), acc.numel(), dtype, acc.mutable_data_ptr());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gossamer, library) {
  library.def("sparse_wire_bytes(int chunk, int kept, int row_numel) -> int", sparse_wire_bytes);
  library.def("sparse_encode(Tensor x, int chunk, int kept) -> Tensor");
  library.def("sparse_decode_add(Tensor wire, int chunk, int kept, Tensor(a!) acc) -> ()");
}

TORCH_LIBRARY_IMPL(gossamer, CompositeExplicitAutograd, library) {
  library.impl("sparse_encode", sparse_encode);
  library.impl("sparse_decode_add", sparse_decode_add);
}

}  // namespace gossamer
