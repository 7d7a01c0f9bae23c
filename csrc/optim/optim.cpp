// The choice among the CPU kernels, which are compiled once per instruction set in cpu_*.cpp, and the part of a
// list of segments that one thread takes.
#include "optim/optim.h"

#include <type_traits>

#include "base/kernel_tables.h"

namespace gossamer::optim {

GOSSAMER_CHOOSE_KERNELS()

namespace {

template <class Memory>
Memory* advanced(Memory* memory, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Memory>, const char, char>;
  return memory == nullptr ? nullptr : static_cast<Byte*>(memory) + bytes;
}

// body(segment) for what of each segment lies in [begin, end).
template <class Body>
void each_part(Dtype dtype, const Segment* segments, int64_t count, int64_t begin, int64_t end, Body body) {
  const int64_t size = element_size(dtype), state_size = element_size(accumulate_dtype(dtype));
  int64_t first = 0;  // of the segment, counted through all
  for (const Segment* s = segments; s != segments + count && first < end; first += s->numel, ++s) {
    const int64_t from = begin > first ? begin - first : 0;
    const int64_t to = end - first < s->numel ? end - first : s->numel;
    if (from >= to) continue;
    Segment part{advanced(s->param, from * size), advanced(s->grad, from * size), {}, to - from};
    for (int k = 0; k < 2; ++k) part.states[k] = advanced(s->states[k], from * state_size);
    body(part);
  }
}

}  // namespace

void adam(Dtype dtype, const Adam& adam, const Segment* segments, int64_t count, int64_t begin, int64_t end) {
  const Kernels& table = kernels();
  each_part(dtype, segments, count, begin, end, [&](const Segment& part) { table.adam(dtype, adam, part); });
}

void sgd(Dtype dtype, const Sgd& sgd, const Segment* segments, int64_t count, int64_t begin, int64_t end) {
  const Kernels& table = kernels();
  each_part(dtype, segments, count, begin, end, [&](const Segment& part) { table.sgd(dtype, sgd, part); });
}

}  // namespace gossamer::optim
