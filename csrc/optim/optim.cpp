// The choice among the CPU kernels, which are compiled once per instruction set in cpu_*.cpp, and the part of a
// list of segments that one thread takes.
#include "optim/optim.h"

#include <atomic>
#include <cstring>
#include <type_traits>

namespace gossamer::optim {

extern const Kernels scalar_kernels;
extern const Kernels* const avx2_kernels;
extern const Kernels* const avx512_kernels;

namespace {

const Kernels* if_supported(const Kernels* table, bool supported) { return supported ? table : nullptr; }

#if defined(__x86_64__) || defined(__i386__)
const Kernels* usable_avx2() {
  return if_supported(avx2_kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                                        __builtin_cpu_supports("fma"));
}
const Kernels* usable_avx512() {
  return if_supported(avx512_kernels,
                      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
}
#else
const Kernels* usable_avx2() { return nullptr; }
const Kernels* usable_avx512() { return nullptr; }
#endif

const Kernels* widest() {
  if (const Kernels* table = usable_avx512()) return table;
  if (const Kernels* table = usable_avx2()) return table;
  return &scalar_kernels;
}

std::atomic<const Kernels*>& selected() {
  static std::atomic<const Kernels*> table{widest()};
  return table;
}

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

const Kernels& kernels() { return *selected().load(std::memory_order_acquire); }

const Kernels* kernels_by_name(const char* name) {
  if (strcmp(name, "scalar") == 0) return &scalar_kernels;
  if (strcmp(name, "avx2") == 0) return usable_avx2();
  if (strcmp(name, "avx512") == 0) return usable_avx512();
  return nullptr;
}

bool select_kernels(const char* name) {
  const Kernels* table = kernels_by_name(name);
  if (table != nullptr) selected().store(table, std::memory_order_release);
  return table != nullptr;
}

}  // namespace gossamer::optim
