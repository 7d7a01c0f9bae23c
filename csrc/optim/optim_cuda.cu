// optim/cuda.h: a table of segments travels as the kernel's argument, and every thread block takes a chunk of
// one segment, four elements a thread at a time. Never synchronises, allocates nothing. Flags: --fmad=false, so
// that products are fused only where rules.h says so.
#define GOSSAMER_ISA device
#include "base/cuda_launch.cuh"
#include "optim/cuda.h"
#include "optim/rules.h"

namespace gossamer::optim::cuda {
namespace {

using namespace gossamer::device;

constexpr int kThreads = 256;
constexpr int64_t kChunk = 4096;  // elements of one thread block
constexpr int kWidth = 4;         // elements of one thread at a time
constexpr int kTableSize = 80;    // segments of one launch: the arguments stay below 4 KiB

struct Table {
  void* param[kTableSize];
  const void* grad[kTableSize];
  void* states[2][kTableSize];
  int64_t numel[kTableSize];
  int first_chunk[kTableSize + 1];
  int count;
};
static_assert(sizeof(Table) + sizeof(AdamRule<One<double>>) + 64 <= 4096, "arguments are limited to 4 KiB");

template <class T>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
  T v[kWidth];
};

template <class T>
bool __device__ is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Pack<T>) == 0;
}

// One chunk's memory.
template <class T, class N>
struct Pointers {
  T* param;
  const T* grad;
  N* states[2];
};

template <class T, class N, class Rule>
__device__ __forceinline__ void update_pack(const Rule& rule, const Pointers<T, N>& at, int64_t i) {
  using L = One<N>;
  Pack<T> param = reinterpret_cast<const Pack<T>*>(at.param)[i];
  const Pack<T> grad = reinterpret_cast<const Pack<T>*>(at.grad)[i];
  Pack<N> states[Rule::kStates + 1];
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) states[s] = reinterpret_cast<const Pack<N>*>(at.states[s])[i];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    N p = L::load(param.v + k), state[Rule::kStates + 1];
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) state[s] = states[s].v[k];
    rule(p, L::load(grad.v + k), state);
    L::store(param.v + k, p);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) states[s].v[k] = state[s];
  }
  reinterpret_cast<Pack<T>*>(at.param)[i] = param;
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) reinterpret_cast<Pack<N>*>(at.states[s])[i] = states[s];
}

template <class T, class N, class Rule>
__device__ __forceinline__ void update_one(const Rule& rule, const Pointers<T, N>& at, int64_t i) {
  using L = One<N>;
  N p = L::load(at.param + i), state[Rule::kStates + 1];
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) state[s] = at.states[s][i];
  rule(p, L::load(at.grad + i), state);
  L::store(at.param + i, p);
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) at.states[s][i] = state[s];
}

template <class T, class Rule>
__global__ void __launch_bounds__(kThreads) update_segments(Table table, Rule rule) {
  using N = typename Rule::N;
  const int chunk = static_cast<int>(blockIdx.x);
  const int segment = segment_of(table.first_chunk, table.count, chunk);
  const int64_t begin = (chunk - table.first_chunk[segment]) * kChunk;
  const int64_t left = table.numel[segment] - begin;
  const int64_t count = left < kChunk ? left : kChunk;

  Pointers<T, N> at{
      static_cast<T*>(table.param[segment]) + begin, static_cast<const T*>(table.grad[segment]) + begin, {}};
  bool aligned = is_aligned(at.param) && is_aligned(at.grad);
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    at.states[s] = static_cast<N*>(table.states[s][segment]) + begin;
    aligned = aligned && is_aligned(at.states[s]);
  }
  const int64_t packs = aligned ? count / kWidth : 0;
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) update_pack(rule, at, i);
  for (int64_t i = packs * kWidth + threadIdx.x; i < count; i += kThreads) update_one(rule, at, i);
}

bool is_aligned_to(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

template <class T, class Rule>
void launch(Table& table, const Rule& rule, cudaStream_t stream) {
  if (table.count == 0) return;
  const auto chunks = static_cast<unsigned>(table.first_chunk[table.count]);
  device::launch(update_segments<T, Rule>, chunks, kThreads, stream, table, rule);
  table.count = 0;
  check_launch("optim", ErrorKind::config);
}

// Collects segments and launches them a table at a time.
template <class T, class Rule>
void run(const Rule& rule, const Segment* segments, int64_t count, cudaStream_t stream) {
  Table table{};
  for (const Segment* s = segments; s != segments + count; ++s) {
    if (s->numel <= 0) continue;
    bool aligned = is_aligned_to(s->param, alignof(T)) && is_aligned_to(s->grad, alignof(T));
    for (int k = 0; k < Rule::kStates; ++k)
      aligned = aligned && is_aligned_to(s->states[k], alignof(typename Rule::N));
    GOSSAMER_CHECK(aligned, ErrorKind::config,
                   "optim: device memory must be aligned to its element type, got a parameter at ", s->param,
                   ", a gradient at ", s->grad, " and states at ", s->states[0], " and ", s->states[1]);
    const int i = table.count;
    table.param[i] = s->param;
    table.grad[i] = s->grad;
    for (int k = 0; k < 2; ++k) table.states[k][i] = s->states[k];
    table.numel[i] = s->numel;
    const auto chunks = static_cast<int>((s->numel + kChunk - 1) / kChunk);
    table.first_chunk[i + 1] = table.first_chunk[i] + chunks;
    if (++table.count == kTableSize) launch<T>(table, rule, stream);
  }
  launch<T>(table, rule, stream);
}

// body(T{}, lane) for the element type that `dtype` names and the lane that it is computed in.
template <class Body>
void with_element_type(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::f32: return body(float{}, One<float>{});
    case Dtype::f64: return body(double{}, One<double>{});
    case Dtype::f16: return body(Half{}, One<float>{});
    case Dtype::bf16: return body(Bfloat{}, One<float>{});
  }
}

}  // namespace

void adam(Dtype dtype, const Adam& adam, const Segment* segments, int64_t count, cudaStream_t stream) {
  with_element_type(dtype, [&](auto element, auto lane) {
    run<decltype(element)>(AdamRule<decltype(lane)>(adam), segments, count, stream);
  });
}

void sgd(Dtype dtype, const Sgd& sgd, const Segment* segments, int64_t count, cudaStream_t stream) {
  with_element_type(dtype, [&](auto element, auto lane) {
    using T = decltype(element);
    using L = decltype(lane);
    if (sgd.momentum != 0)
      run<T>(SgdRule<L, true>(sgd), segments, count, stream);
    else
      run<T>(SgdRule<L, false>(sgd), segments, count, stream);
  });
}

}  // namespace gossamer::optim::cuda
