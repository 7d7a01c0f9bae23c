// The arithmetic of the updates, shared by cpu_driver.inl and optim_cuda.cu: one lane of parameter, gradient and states.
// Operations are in the order of torch's (torch.optim, foreach and single-tensor). A product is fused with a sum only
// where torch's AVX2 and AVX-512 kernels fuse it (add with alpha, addcmul, lerp). A rule holds its numbers in the lane's
// form, so that they are broadcast once.
#pragma once

#include "optim/lane.h"
#include "optim/optim.h"

namespace gossamer::GOSSAMER_ISA {

// V is a lane's value: one number, or one vector register. N is the type of a number.
template <class Lane>
struct AdamRule {
  using V = typename Lane::V;
  using N = typename Lane::N;
  static constexpr int kStates = 2;

  bool maximize, decays, shrinks, keeps_most;
  V weight_decay, shrink, weight, rest, beta2, square_weight, root_correction2, eps, minus_step_size;

  explicit HD AdamRule(const optim::Adam& a)
      : maximize(a.maximize),
        decays(a.weight_decay != 0),
        shrinks(a.shrink != 1),
        keeps_most(static_cast<N>(1 - a.beta1) < static_cast<N>(0.5)),
        weight_decay(Lane::set(static_cast<N>(a.weight_decay))),
        shrink(Lane::set(static_cast<N>(a.shrink))),
        weight(Lane::set(static_cast<N>(1 - a.beta1))),
        rest(Lane::set(static_cast<N>(1 - a.beta1) - 1)),
        beta2(Lane::set(static_cast<N>(a.beta2))),
        square_weight(Lane::set(static_cast<N>(1 - a.beta2))),
        root_correction2(Lane::set(static_cast<N>(a.root_correction2))),
        eps(Lane::set(static_cast<N>(a.eps))),
        minus_step_size(Lane::set(static_cast<N>(-a.step_size))) {}

  HD void operator()(V& param, V grad, V* states) const {
    V &mean = states[0], &square = states[1];
    if (maximize) grad = -grad;
    if (shrinks) param = param * shrink;
    if (decays) grad = multiply_add(param, weight_decay, grad);
    const V way = grad - mean;  // torch's lerp starts from the nearer end
    mean = keeps_most ? multiply_add(weight, way, mean) : multiply_add(rest, way, grad);
    square = multiply_add(square_weight * grad, grad, square * beta2);
    const V denominator = square_root(square) / root_correction2 + eps;
    param = param + minus_step_size * mean / denominator;
  }
};

template <class Lane, bool kMomentum>
struct SgdRule {
  using V = typename Lane::V;
  using N = typename Lane::N;
  static constexpr int kStates = kMomentum ? 1 : 0;

  bool maximize, decays, nesterov, first;
  V weight_decay, momentum, grad_weight, minus_lr;

  explicit HD SgdRule(const optim::Sgd& s)
      : maximize(s.maximize),
        decays(s.weight_decay != 0),
        nesterov(s.nesterov),
        first(s.first),
        weight_decay(Lane::set(static_cast<N>(s.weight_decay))),
        momentum(Lane::set(static_cast<N>(s.momentum))),
        grad_weight(Lane::set(static_cast<N>(1 - s.dampening))),
        minus_lr(Lane::set(static_cast<N>(-s.lr))) {}

  HD void operator()(V& param, V grad, V* states) const {
    if (maximize) grad = -grad;
    if (decays) grad = multiply_add(param, weight_decay, grad);
    if constexpr (kMomentum) {
      V& buffer = states[0];
      buffer = first ? grad : multiply_add(grad, grad_weight, buffer * momentum);
      grad = nesterov ? multiply_add(buffer, momentum, grad) : buffer;
    }
    param = multiply_add(grad, minus_lr, param);
  }
};

}  // namespace gossamer::GOSSAMER_ISA
