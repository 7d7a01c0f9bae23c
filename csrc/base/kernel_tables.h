// The choice among tables of kernels. Each instruction set has one (cpu_*.cpp of adasum/, codec/, optim/ and shm/); the
// widest that the CPU can run is used, unless a test selects another by name.
#pragma once

#include <atomic>
#include <cstring>

namespace gossamer {

// `Kernels` is a struct with a `name`. A table that the build lacks is null.
template <class Kernels>
class KernelTables {
 public:
  // From the narrowest to the widest.
  KernelTables(const Kernels* scalar, const Kernels* neon, const Kernels* avx2, const Kernels* avx512)
      : tables_{scalar, neon, usable_avx2() ? avx2 : nullptr, usable_avx512() ? avx512 : nullptr} {
    for (const Kernels* table : tables_)
      if (table != nullptr) selected_ = table;
  }

  const Kernels& selected() const { return *selected_.load(std::memory_order_acquire); }

  // Null for an unknown name, and for a table that this CPU or build cannot run.
  const Kernels* find(const char* name) const {
    for (const Kernels* table : tables_) {
      if (table != nullptr && strcmp(name, table->name) == 0) return table;
    }
    return nullptr;
  }

  bool select(const char* name) {
    const Kernels* table = find(name);
    if (table != nullptr) selected_.store(table, std::memory_order_release);
    return table != nullptr;
  }

 private:
#if defined(__x86_64__) || defined(__i386__)
  static bool usable_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
  }
  static bool usable_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#else
  static bool usable_avx2() { return false; }
  static bool usable_avx512() { return false; }
#endif

  const Kernels* tables_[4];
  std::atomic<const Kernels*> selected_;
};

}  // namespace gossamer

// Defines kernels(), kernels_by_name() and select_kernels() of a folder: the choice among the tables of its cpu_*.cpp. Stands
// in the folder's namespace, in one file.
#define GOSSAMER_CHOOSE_KERNELS()                                                                 \
  extern const Kernels* const scalar_kernels;                                                     \
  extern const Kernels* const neon_kernels;                                                       \
  extern const Kernels* const avx2_kernels;                                                       \
  extern const Kernels* const avx512_kernels;                                                     \
  static KernelTables<Kernels>& tables() {                                                        \
    static KernelTables<Kernels> all(scalar_kernels, neon_kernels, avx2_kernels, avx512_kernels); \
    return all;                                                                                   \
  }                                                                                               \
  const Kernels& kernels() { return tables().selected(); }                                        \
  const Kernels* kernels_by_name(const char* name) { return tables().find(name); }                \
  bool select_kernels(const char* name) { return tables().select(name); }
