// See traffic.h. Compiled without sanitizers.
#include "traffic.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {
namespace {

struct Region {
  const uint8_t* begin;
  std::vector<char> read, written;  // by byte
};
std::vector<Region> regions;
Traffic traffic{};
size_t launches_before;

void touch(const void* address, size_t bytes, std::vector<char> Region::* kind, int64_t& distinct) {
  const auto* p = static_cast<const uint8_t*>(address);
  for (Region& region : regions) {
    if (p < region.begin || p >= region.begin + region.read.size()) continue;
    const auto first = static_cast<size_t>(p - region.begin);
    if (kind == &Region::read) {
      traffic.read_at_all += static_cast<int64_t>(bytes);
      traffic.widest_loads += bytes == 16;
    }
    for (size_t i = first; i < first + bytes; ++i)
      if (!std::exchange((region.*kind)[i], 1)) ++distinct;
  }
}

}  // namespace

void watch(const void* memory, size_t bytes) {
  regions.push_back(
      {static_cast<const uint8_t*>(memory), std::vector<char>(bytes), std::vector<char>(bytes)});
}

void forget(const void* memory) {
  const auto is_it = [memory](const Region& region) { return region.begin == memory; };
  regions.erase(std::remove_if(regions.begin(), regions.end(), is_it), regions.end());
}

Traffic take_traffic() {
  for (Region& region : regions) {
    region.read.assign(region.read.size(), false);
    region.written.assign(region.written.size(), false);
  }
  traffic.launches = static_cast<int64_t>(launches() - std::exchange(launches_before, launches()));
  return std::exchange(traffic, {});
}

}  // namespace emulator

extern "C" {
#define EMULATOR_ACCESS(bytes)                                                        \
  void __tsan_read##bytes(void* p) {                                                  \
    emulator::touch(p, bytes, &emulator::Region::read, emulator::traffic.read);       \
  }                                                                                   \
  void __tsan_write##bytes(void* p) {                                                 \
    emulator::touch(p, bytes, &emulator::Region::written, emulator::traffic.written); \
  }                                                                                   \
  void __tsan_unaligned_read##bytes(void* p) { __tsan_read##bytes(p); }               \
  void __tsan_unaligned_write##bytes(void* p) { __tsan_write##bytes(p); }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
#undef EMULATOR_ACCESS
void __tsan_read_range(void* p, size_t bytes) {
  emulator::touch(p, bytes, &emulator::Region::read, emulator::traffic.read);
}
void __tsan_write_range(void* p, size_t bytes) {
  emulator::touch(p, bytes, &emulator::Region::written, emulator::traffic.written);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
}
