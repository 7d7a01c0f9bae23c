// The loop that runs a rule over a segment. Included once by each cpu_*.cpp, after base/instruction_set.h. Free of std::
// code: everything here is compiled with that file's flags. There is only the vector loop: elements that do not fill a lane
// are padded on the stack.

#include <cstring>
#include <type_traits>

#include "optim/rules.h"

#if !defined(GOSSAMER_LACKS_FLAGS)
namespace gossamer::GOSSAMER_ISA {
namespace {

using optim::Adam;
using optim::Segment;
using optim::Sgd;

// Updates the lane that begins at element i.
template <class Lane, class T, class Rule>
HD void update(const Rule& rule, T* param, const T* grad, typename Lane::N* const* states, int64_t i) {
  typename Lane::V p = Lane::load(param + i), state[Rule::kStates + 1];
  for (int k = 0; k < Rule::kStates; ++k) state[k] = Lane::load(states[k] + i);
  rule(p, Lane::load(grad + i), state);
  for (int k = 0; k < Rule::kStates; ++k) Lane::store(states[k] + i, state[k]);
  Lane::store(param + i, p);
}

template <class Lane, class T, class Rule>
void run(const Rule& rule, const Segment& segment) {
  using N = typename Lane::N;
  auto* param = static_cast<T*>(segment.param);
  const auto* grad = static_cast<const T*>(segment.grad);
  N* const states[2] = {static_cast<N*>(segment.states[0]), static_cast<N*>(segment.states[1])};
  int64_t i = 0;
  for (; i + Lane::width <= segment.numel; i += Lane::width) update<Lane>(rule, param, grad, states, i);

  const int64_t left = segment.numel - i;
  if (left <= 0) return;
  T last_param[Lane::width] = {}, last_grad[Lane::width] = {};
  N last[2][Lane::width] = {};
  N* const last_states[2] = {last[0], last[1]};
  memcpy(last_param, param + i, left * sizeof(T));
  memcpy(last_grad, grad + i, left * sizeof(T));
  for (int k = 0; k < Rule::kStates; ++k) memcpy(last[k], states[k] + i, left * sizeof(N));
  update<Lane>(rule, last_param, last_grad, last_states, 0);
  memcpy(param + i, last_param, left * sizeof(T));
  for (int k = 0; k < Rule::kStates; ++k) memcpy(states[k] + i, last[k], left * sizeof(N));
}

// body(T{}, Lane{}) for the element type that `dtype` names and the lane that it is computed in.
template <class Body>
void with_element_type(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::f32: return body(float{}, Lane<float>{});
    case Dtype::f64: return body(double{}, Lane<double>{});
    case Dtype::f16: return body(Half{}, Lane<float>{});
    case Dtype::bf16: return body(Bfloat{}, Lane<float>{});
  }
}

void adam(Dtype dtype, const Adam& adam, const Segment& segment) {
  with_element_type(dtype, [&](auto element, auto lane) {
    run<decltype(lane), decltype(element)>(AdamRule<decltype(lane)>(adam), segment);
  });
}

void sgd(Dtype dtype, const Sgd& sgd, const Segment& segment) {
  with_element_type(dtype, [&](auto element, auto lane) {
    using T = decltype(element);
    using L = decltype(lane);
    if (sgd.momentum != 0)
      run<L, T>(SgdRule<L, true>(sgd), segment);
    else
      run<L, T>(SgdRule<L, false>(sgd), segment);
  });
}

}  // namespace
}  // namespace gossamer::GOSSAMER_ISA
#endif

namespace gossamer::optim {
GOSSAMER_KERNEL_TABLE(GOSSAMER_ISA::adam, GOSSAMER_ISA::sgd);
}  // namespace gossamer::optim
