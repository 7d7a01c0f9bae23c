// Fused optimizer updates: one pass over parameter, gradient and states, in torch's order of operations.
// Torch-free. Called through device_kernels.h and by the C++ tests; cuda.h is its twin for CUDA streams.
//
// Elements are computed in accumulate_dtype(dtype), and states are stored in it: float16 and bfloat16
// parameters have float32 states, and are rounded (to nearest even) when they are stored. An element's result
// depends on that element alone: not on the segment, the instruction set, the thread or the device.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace gossamer::optim {

// A parameter, or several that are neighbours in memory, as their gradients and states are.
struct Segment {
  void* param;
  const void* grad;  // of param's dtype
  void* states[2];   // Adam: exp_avg, exp_avg_sq. Sgd: momentum_buffer, or none
  int64_t numel;
};

struct Adam {
  double beta1;
  double beta2;
  double eps;
  double step_size;         // lr / (1 - beta1^step)
  double root_correction2;  // (1 - beta2^step)^0.5
  double weight_decay;      // times the parameter, added to the gradient
  double shrink;            // the parameter is multiplied by it first: 1 - lr * (decoupled weight decay)
  bool maximize;
};

struct Sgd {
  double lr;
  double momentum;  // 0: there are no states
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize;
  bool first;  // momentum_buffer holds nothing yet, and becomes the gradient
};

// Updates elements [begin, end) of the segments, which are counted through all of them in order, so that
// threads can share one list. Any alignment.
void adam(Dtype dtype, const Adam& adam, const Segment* segments, int64_t count, int64_t begin, int64_t end);
void sgd(Dtype dtype, const Sgd& sgd, const Segment* segments, int64_t count, int64_t begin, int64_t end);

struct Kernels {
  const char* name;  // "scalar", "neon", "avx2", "avx512"
  void (*adam)(Dtype dtype, const Adam& adam, const Segment& segment);
  void (*sgd)(Dtype dtype, const Sgd& sgd, const Segment& segment);
};

// The kernels for this machine, chosen once; `select_kernels` picks by name (tests, benchmarks) and returns
// false if this CPU or build lacks them.
const Kernels& kernels();
bool select_kernels(const char* name);
const Kernels* kernels_by_name(const char* name);  // nullptr if this CPU or build lacks them

}  // namespace gossamer::optim
