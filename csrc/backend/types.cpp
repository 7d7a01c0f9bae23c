// See types.h.
#include "backend/types.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "errors.h"

namespace gossamer {
namespace {

shm::Op to_shm_op(c10d::ReduceOp::RedOpType op, const char* where) {
  switch (op) {
    case c10d::ReduceOp::SUM: return shm::Op::sum;
    case c10d::ReduceOp::AVG: return shm::Op::avg;
    case c10d::ReduceOp::PRODUCT: return shm::Op::product;
    case c10d::ReduceOp::MIN: return shm::Op::min;
    case c10d::ReduceOp::MAX: return shm::Op::max;
    case c10d::ReduceOp::BAND: return shm::Op::band;
    case c10d::ReduceOp::BOR: return shm::Op::bor;
    case c10d::ReduceOp::BXOR: return shm::Op::bxor;
    case c10d::ReduceOp::PREMUL_SUM: return shm::Op::premul_sum;
    default: break;
  }
  raise_python(ErrorKind::config, where, ": unknown reduce operation ", static_cast<int>(op));
}

double factor_of(const c10d::ReduceOp& op) {
  const auto& supplement = supplement_of(op);
  return supplement.tensor_factor.defined() ? supplement.tensor_factor.item().toDouble()
                                            : supplement.double_factor;
}

}  // namespace

const c10d::NCCLPreMulSumSupplement& supplement_of(const c10d::ReduceOp& op) {
  // torch 2.11 and 2.13 share this name; nothing in it depends on NCCL.
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (!supplement) raise_python(ErrorKind::config, "PREMUL_SUM needs a factor, got none");
  return *supplement;
}

shm::Type to_shm(at::ScalarType type, const char* where) {
  switch (type) {
    case at::kByte: return shm::Type::u8;
    case at::kChar: return shm::Type::i8;
    case at::kUInt16: return shm::Type::u16;
    case at::kShort: return shm::Type::i16;
    case at::kUInt32: return shm::Type::u32;
    case at::kInt: return shm::Type::i32;
    case at::kUInt64: return shm::Type::u64;
    case at::kLong: return shm::Type::i64;
    case at::kBool: return shm::Type::boolean;
    case at::kHalf: return shm::Type::f16;
    case at::kBFloat16: return shm::Type::bf16;
    case at::kFloat: return shm::Type::f32;
    case at::kDouble: return shm::Type::f64;
    case at::kFloat8_e4m3fn: return shm::Type::e4m3fn;
    case at::kFloat8_e4m3fnuz: return shm::Type::e4m3fnuz;
    case at::kFloat8_e5m2: return shm::Type::e5m2;
    case at::kFloat8_e5m2fnuz: return shm::Type::e5m2fnuz;
    case at::kComplexHalf: return shm::Type::c32;
    case at::kComplexFloat: return shm::Type::c64;
    case at::kComplexDouble: return shm::Type::c128;
    default: break;
  }
  raise_python(ErrorKind::config, where, ": tensors of ", type, " cannot be reduced");
}

shm::Summing to_shm(const c10d::ReduceOp& op, at::ScalarType type, int size, const char* where) {
  shm::Summing summing;
  auto& reduction = summing.reduction;
  reduction.from = reduction.to = to_shm(type, where);
  reduction.op = to_shm_op(op.op_, where);
  check_argument(shm::supports(reduction.from, reduction.op), where, ": ", shm::name(reduction.op),
                 " is not defined for ", shm::name(reduction.from), " tensors");
  if (reduction.op == shm::Op::avg) reduction.divisor = size;
  if (reduction.op == shm::Op::premul_sum) summing.factor = factor_of(op);
  return summing;
}

// tensor_data() is detach() without the dispatcher.
Flat::Flat(const at::Tensor& tensor, bool later)
    : tensor_(later || !tensor.is_contiguous() ? tensor.tensor_data() : tensor),
      same_(tensor.is_contiguous()),
      of_complex_(is_of_complex(tensor)) {
  flat_ = same_ ? tensor_ : tensor_.contiguous();
}

void Flat::write_back() {
  // This thread does not have the caller's inference mode.
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!same_) tensor_.copy_(flat_);
}

std::vector<Flat> flatten(const std::vector<at::Tensor>& tensors) { return {tensors.begin(), tensors.end()}; }

std::vector<void*> pointers(const std::vector<Flat>& flats) {
  std::vector<void*> all;
  for (const auto& flat : flats) all.push_back(flat.data());
  return all;
}

void write_back(std::vector<Flat>& flats) {
  for (auto& flat : flats) flat.write_back();
}

std::vector<void*> parts_of(const Flat& flat, int parts) {
  std::vector<void*> all;
  for (int part = 0; part < parts; ++part) {
    all.push_back(static_cast<uint8_t*>(flat.data()) + flat.bytes() / parts * part);
  }
  return all;
}

}  // namespace gossamer
