// See elements.h.
#include "named/elements.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Half.h>

#include "base/check.h"
#include "device_kernels.h"
#include "float_dtype.h"

namespace gossamer::named {

using negotiate::Aggregate;

std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

at::ScalarType dtype_of(const std::string& name) {
  for (int i = 0; i < static_cast<int>(at::ScalarType::Undefined); ++i) {
    const auto type = static_cast<at::ScalarType>(i);
    if (c10::getDtypeNames(type).first == name) return type;
  }
  raise(ErrorKind::comm, "negotiate: got the dtype '", name, "', which this rank's torch does not have");
}

std::string reduction_complaint(at::ScalarType type, Aggregate op) {
  const bool floats = float_dtype(type).has_value();
  const bool complex = type == at::kComplexFloat || type == at::kComplexDouble;
  const bool integers = at::isIntegralType(type, /*includeBool=*/true);
  if (!floats && !complex && !integers) {
    return dtype_name(type) + " cannot be reduced; it can be gathered, broadcast and exchanged";
  }
  const bool order_matters = op == Aggregate::min || op == Aggregate::max;
  if (complex && (order_matters || op == Aggregate::product)) {
    return std::string(negotiate::name(op)) + " is not defined here for " + dtype_name(type) +
           "; take Sum or Average";
  }
  if (type == at::kBool && op == Aggregate::average) return "bool has no average; take Sum, Min or Max";
  if (type == at::kUInt64 && order_matters) return "uint64 has no Min and Max here; convert it";
  if (op == Aggregate::adasum && !floats)
    return "Adasum takes floating-point tensors, got " + dtype_name(type);
  return {};
}

at::Tensor as_bytes(const at::Tensor& x) {
  if (x.numel() == 0) return at::empty({0}, x.options().dtype(at::kByte));
  return at::from_blob(
      x.data_ptr(), {static_cast<int64_t>(x.nbytes())}, [x](void*) {}, x.options().dtype(at::kByte),
      x.device());
}

double effective_factor(double factor, at::ScalarType type, const at::Device& device) {
  return type == at::kHalf && device.is_cuda() ? static_cast<float>(c10::Half(static_cast<float>(factor)))
                                               : factor;
}

void scale(const at::Tensor& x, double factor) {
  if (factor == 1.0 || x.numel() == 0) return;
  if (const auto dtype = float_dtype(x.scalar_type())) {
    const double exact = effective_factor(factor, x.scalar_type(), x.device());
    return device_kernels(x.device().type()).scale(*dtype, x.data_ptr(), x.numel(), exact);
  }
  if (x.is_complex()) {
    x.mul_(factor);
  } else {
    x.copy_(x.to(at::kDouble).mul_(factor).trunc_());
  }
}

}  // namespace gossamer::named
