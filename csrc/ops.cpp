// torch.ops.gossamer: the codecs as tensor operations, on any device that device_kernels.h knows. Schemas are declared
// once. Python's codec classes call these; collectives/ and engine/ call the kernels directly.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "collectives/two_shot.h"
#include "device_kernels.h"
#include "errors.h"

namespace gossamer {
namespace {

// `key`: the 64 bits of codec::Spec::key as a signed number, because schemas have no unsigned ones.
codec::Spec spec_of(int64_t kind, int64_t block, at::ScalarType type, int64_t key = 0) {
  auto spec = CodecChoice{static_cast<codec::Kind>(kind), block}.spec(type);
  spec.key = static_cast<uint64_t>(key);
  return spec;
}

void check(bool ok, const char* where, const char* must, const at::Tensor& got) {
  if (ok) return;
  raise_python(ErrorKind::codec, where, ": ", must, ", got ", got.scalar_type(), " ", got.sizes(), " on ",
               got.device());
}

void check_wire(const char* where, const at::Tensor& wire, const codec::Spec& spec, int64_t row_numel) {
  const bool fits = wire.dim() == 2 && wire.is_contiguous() && wire.scalar_type() == at::kByte &&
                    wire.size(1) == codec::row_bytes(spec, row_numel);
  if (fits) return;
  raise_python(ErrorKind::codec, where, ": wire must be contiguous uint8 [rows, ",
               codec::row_bytes(spec, row_numel), "] for rows of ", row_numel, " elements, got ",
               wire.scalar_type(), " ", wire.sizes());
}

int64_t wire_bytes(int64_t kind, int64_t block, at::ScalarType type, int64_t row_numel) {
  return codec::row_bytes(spec_of(kind, block, type), row_numel);
}

at::Tensor encode(const at::Tensor& x, int64_t kind, int64_t block, int64_t key) {
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  const auto spec = spec_of(kind, block, x.scalar_type(), key);
  check(x.dim() == 2 && x.is_contiguous(), "encode", "x must be contiguous [rows, row_numel]", x);
  auto wire = at::empty({x.size(0), codec::row_bytes(spec, x.size(1))}, x.options().dtype(at::kByte));
  device_kernels(x.device().type())
      .encode(spec, spec.dtype, x.data_ptr(), {x.size(0), x.size(1), x.numel()}, bytes_of(wire));
  return wire;
}

void decode(const at::Tensor& wire, int64_t kind, int64_t block, at::Tensor out) {
  const c10::OptionalDeviceGuard guard(at::device_of(out));
  const auto spec = spec_of(kind, block, out.scalar_type());
  check(out.dim() == 2 && out.is_contiguous() && out.size(0) == wire.size(0), "decode",
        "out must be contiguous [rows, row_numel] with the wire's rows", out);
  check(out.device() == wire.device(), "decode", "out must be on the wire's device", out);
  check_wire("decode", wire, spec, out.size(1));
  device_kernels(out.device().type())
      .decode(spec, bytes_of(wire), {out.size(0), out.size(1), out.numel()}, out.data_ptr());
}

void decode_add(const at::Tensor& wire, int64_t kind, int64_t block, at::ScalarType type, at::Tensor acc) {
  const c10::OptionalDeviceGuard guard(at::device_of(wire));
  const auto spec = spec_of(kind, block, type);
  const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
  check(acc.dim() == 1 && acc.is_contiguous() && acc.scalar_type() == wide, "decode_add",
        "acc must be a contiguous vector of float32 (float64 for float64 tensors)", acc);
  check(acc.device() == wire.device(), "decode_add", "acc must be on the wire's device", acc);
  check_wire("decode_add", wire, spec, acc.numel());
  device_kernels(acc.device().type())
      .decode_add(spec, bytes_of(wire), wire.size(0), acc.numel(), acc.numel(), acc.data_ptr());
}

at::Tensor reduce_encode(const at::Tensor& wire, int64_t kind, int64_t block, at::ScalarType type,
                         int64_t row_numel, double scale, int64_t key) {
  const c10::OptionalDeviceGuard guard(at::device_of(wire));
  const auto spec = spec_of(kind, block, type, key);
  check_wire("reduce_encode", wire, spec, row_numel);
  auto out = at::empty({1, wire.size(1)}, wire.options());
  auto sum = at::empty({row_numel}, wire.options().dtype(type == at::kDouble ? at::kDouble : at::kFloat));
  device_kernels(wire.device().type())
      .reduce_encode(spec, bytes_of(wire), wire.size(0), row_numel, row_numel, scale, bytes_of(out),
                     sum.data_ptr());
  return out;
}

}  // namespace

TORCH_LIBRARY(gossamer, library) {
  library.def("wire_bytes(int kind, int block, ScalarType dtype, int row_numel) -> int", wire_bytes);
  library.def("encode(Tensor x, int kind, int block, int key=0) -> Tensor");
  library.def("decode(Tensor wire, int kind, int block, Tensor(a!) out) -> ()");
  library.def("decode_add(Tensor wire, int kind, int block, ScalarType dtype, Tensor(a!) acc) -> ()");
  library.def(
      "reduce_encode(Tensor wire, int kind, int block, ScalarType dtype, int row_numel, float scale, int "
      "key=0) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(gossamer, CompositeExplicitAutograd, library) {
  library.impl("encode", encode);
  library.impl("decode", decode);
  library.impl("decode_add", decode_add);
  library.impl("reduce_encode", reduce_encode);
}

}  // namespace gossamer
