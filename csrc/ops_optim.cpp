// torch.ops.gossamer: an optimizer's step over lists of tensors in one call, on any device that device_kernels.h knows.
// Called by python/gossamer/optim.py. This file has the checks, the scalars of a step, and the joining of tensors that are
// neighbours in memory; the arithmetic is in optim/.
#include <ATen/DeviceGuard.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "collectives/two_shot.h"
#include "device_kernels.h"
#include "errors.h"

namespace gossamer {
namespace {

// The segments of one kernel call. `step` counts this step; 0 where it does not matter.
struct Batch {
  at::Device device;
  Dtype dtype;
  double step;
  const DeviceKernels* kernels;
  std::vector<optim::Segment> segments;
};

bool follows(const void* next, const void* last, int64_t bytes) {
  return next == (last == nullptr ? nullptr : static_cast<const char*>(last) + bytes);
}

// Collects the tensors of a step, and copies results back where copies were needed. Changes nothing until all are checked.
class Step {
 public:
  explicit Step(const char* where) : where_(where) {}

  void add(const at::Tensor& param, const at::Tensor& grad, std::initializer_list<at::Tensor> states,
           double step) {
    const auto type = param.scalar_type();
    check_argument(param.layout() == at::kStrided && (type == at::kFloat || type == at::kDouble ||
                                                      type == at::kHalf || type == at::kBFloat16),
                   where_, ": parameters must be dense float32, float64, float16 or bfloat16, got ",
                   param.layout(), " ", type, " ", param.sizes());
    const Dtype dtype = to_dtype(type, where_);
    const auto state_type = dtype == Dtype::f64 ? at::kDouble : at::kFloat;
    check_like(param, grad, "gradient", type);
    for (const auto& state : states) check_like(param, state, "state", state_type);

    Batch& batch = batch_of(param.device(), dtype, step);
    // The order of the parameter's elements in memory decides; gradient and states follow it.
    const at::Tensor base = param.is_non_overlapping_and_dense() ? param : param.contiguous();
    optim::Segment segment{changed(param, base), in_order_of(base, grad).const_data_ptr(), {}, param.numel()};
    int k = 0;
    for (const auto& state : states) segment.states[k++] = changed(state, in_order_of(base, state));
    if (segment.numel > 0) batch.segments.push_back(segment);
  }

  // kernel(table, batch) for every batch, on its device.
  template <class Kernel>
  void run(const Kernel& kernel) {
    for (Batch& batch : batches_) {
      join(batch);
      const c10::OptionalDeviceGuard guard(batch.device);
      kernel(*batch.kernels, batch);
    }
    for (const auto& [tensor, copy] : put_back_) tensor.copy_(copy);
    for (const at::Tensor& tensor : changed_)
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }

 private:
  void check_like(const at::Tensor& param, const at::Tensor& other, const char* what,
                  at::ScalarType type) const {
    const bool alike = other.layout() == at::kStrided && other.device() == param.device() &&
                       other.scalar_type() == type && other.sizes() == param.sizes();
    check_argument(alike, where_, ": the ", what, " of a parameter ", param.scalar_type(), " ", param.sizes(),
                   " on ", param.device(), " must be dense ", type, " of its shape, got ", other.layout(),
                   " ", other.scalar_type(), " ", other.sizes(), " on ", other.device());
  }

  const at::Tensor& in_order_of(const at::Tensor& base, const at::Tensor& tensor) {
    const bool alike = (base.is_contiguous() && tensor.is_contiguous()) || tensor.strides() == base.strides();
    kept_.push_back(alike ? tensor
                          : at::empty_strided(base.sizes(), base.strides(), tensor.options()).copy_(tensor));
    return kept_.back();
  }

  // Marks a tensor as changed. `memory` is the tensor or a copy of it.
  void* changed(const at::Tensor& tensor, const at::Tensor& memory) {
    changed_.push_back(tensor);
    if (!memory.is_same(tensor)) put_back_.emplace_back(tensor, memory);
    return memory.data_ptr();
  }

  Batch& batch_of(at::Device device, Dtype dtype, double step) {
    for (Batch& batch : batches_)
      if (batch.device == device && batch.dtype == dtype && batch.step == step) return batch;
    return batches_.emplace_back(Batch{device, dtype, step, &device_kernels(device.type()), {}});
  }

  // Buckets hold parameters in the order of backward, optimizers in the order of the model: so the segments are sorted.
  static void join(Batch& batch) {
    const int64_t size = element_size(batch.dtype), state_size = element_size(accumulate_dtype(batch.dtype));
    std::sort(batch.segments.begin(), batch.segments.end(),
              [](const auto& x, const auto& y) { return std::less<>()(x.param, y.param); });
    std::vector<optim::Segment> joined;
    for (const optim::Segment& next : batch.segments) {
      if (!joined.empty()) {
        optim::Segment& last = joined.back();
        if (follows(next.param, last.param, last.numel * size) &&
            follows(next.grad, last.grad, last.numel * size) &&
            follows(next.states[0], last.states[0], last.numel * state_size) &&
            follows(next.states[1], last.states[1], last.numel * state_size)) {
          last.numel += next.numel;
          continue;
        }
      }
      joined.push_back(next);
    }
    batch.segments = std::move(joined);
  }

  const char* where_;
  std::vector<Batch> batches_;
  std::vector<at::Tensor> changed_;
  std::vector<at::Tensor> kept_;  // alive until the kernels have used their memory
  std::vector<std::pair<at::Tensor, at::Tensor>> put_back_;
};

void check_counts(const char* where, size_t params, std::initializer_list<size_t> others) {
  for (const size_t count : others)
    check_argument(count == params, where, ": every list must have a tensor for each of ", params,
                   " parameters, got ", count);
}

double count_of(const at::Tensor& step) {
  check_argument(step.device().is_cpu() && step.numel() == 1 &&
                     (step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble),
                 "Adam: step must be one float32 or float64 on the CPU, got ", step.scalar_type(), " ",
                 step.sizes(), " on ", step.device());
  return step.scalar_type() == at::kFloat ? *step.const_data_ptr<float>() : *step.const_data_ptr<double>();
}

void count_on(const at::Tensor& step) {
  if (step.scalar_type() == at::kFloat)
    *step.mutable_data_ptr<float>() += 1;
  else
    *step.mutable_data_ptr<double>() += 1;
}

void adam_step_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                at::TensorList exp_avg_sqs, at::TensorList steps, double lr, double beta1, double beta2,
                double eps, double weight_decay, bool decoupled_weight_decay, bool maximize) {
  const at::NoGradGuard no_grad;
  const char* where = decoupled_weight_decay ? "AdamW" : "Adam";
  check_counts(where, params.size(), {grads.size(), exp_avgs.size(), exp_avg_sqs.size(), steps.size()});
  Step step(where);
  for (size_t i = 0; i < params.size(); ++i)
    step.add(params[i], grads[i], {exp_avgs[i], exp_avg_sqs[i]}, count_of(steps[i]) + 1);
  step.run([&](const DeviceKernels& kernels, const Batch& batch) {
    optim::Adam adam{};
    adam.beta1 = beta1;
    adam.beta2 = beta2;
    adam.eps = eps;
    adam.step_size = lr / (1 - std::pow(beta1, batch.step));
    adam.root_correction2 = std::pow(1 - std::pow(beta2, batch.step), 0.5);  // as Python's **, not sqrt
    adam.weight_decay = decoupled_weight_decay ? 0 : weight_decay;
    adam.shrink = decoupled_weight_decay ? 1 - lr * weight_decay : 1;
    adam.maximize = maximize;
    kernels.adam(batch.dtype, adam, batch.segments.data(), static_cast<int64_t>(batch.segments.size()));
  });
  for (const at::Tensor& each : steps) count_on(each);
}

// `momentum_buffers` is empty if momentum is 0; with `first` the buffers hold nothing yet.
void sgd_step_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, double lr,
               double momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
               bool first) {
  const at::NoGradGuard no_grad;
  const size_t buffers = momentum != 0 ? params.size() : 0;
  check_counts("SGD", params.size(), {grads.size(), momentum_buffers.size() + params.size() - buffers});
  Step step("SGD");
  for (size_t i = 0; i < params.size(); ++i)
    if (buffers != 0)
      step.add(params[i], grads[i], {momentum_buffers[i]}, 0);
    else
      step.add(params[i], grads[i], {}, 0);
  const optim::Sgd sgd{lr, momentum, dampening, weight_decay, nesterov, maximize, first};
  step.run([&](const DeviceKernels& kernels, const Batch& batch) {
    kernels.sgd(batch.dtype, sgd, batch.segments.data(), static_cast<int64_t>(batch.segments.size()));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gossamer, library) {
  library.def(
      "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] steps, float lr, float beta1, float beta2, float eps, float weight_decay, "
      "bool decoupled_weight_decay, bool maximize) -> ()");
  library.def(
      "sgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, float lr, "
      "float momentum, float dampening, float weight_decay, bool nesterov, bool maximize, bool first) -> ()");
}

TORCH_LIBRARY_IMPL(gossamer, CompositeExplicitAutograd, library) {
  library.impl("adam_step_", adam_step_);
  library.impl("sgd_step_", sgd_step_);
}

}  // namespace gossamer
