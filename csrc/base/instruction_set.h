// First in each cpu_*.cpp of adasum/, codec/, optim/ and shm/. Such a file is compiled for one instruction set; it says which
// (GOSSAMER_AVX2, GOSSAMER_AVX512, GOSSAMER_NEON, or none) and then includes its folder's driver. Here are the namespace of
// that code (GOSSAMER_ISA), its lane and vector, and the table that the driver ends with. setup.py and cmake/ give each file
// its flags; without them GOSSAMER_LACKS_FLAGS is set and the table is null, so every build may compile the file.
#pragma once

#include <cstdint>

#if defined(GOSSAMER_AVX512)
#define GOSSAMER_ISA avx512
#if !(defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__))
#define GOSSAMER_LACKS_FLAGS
#elif defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own intrinsics (PR 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#elif defined(GOSSAMER_AVX2)
#define GOSSAMER_ISA avx2
#if !(defined(__AVX2__) && defined(__F16C__) && defined(__FMA__))
#define GOSSAMER_LACKS_FLAGS
#endif
#elif defined(GOSSAMER_NEON)
#define GOSSAMER_ISA neon
#if !defined(__aarch64__)
#define GOSSAMER_LACKS_FLAGS
#endif
#else
#define GOSSAMER_ISA scalar
#endif

#include "base/lanes.h"

// What the file says decides, not what the compiler's flags allow: with -march=native they allow AVX everywhere.
namespace gossamer::GOSSAMER_ISA {
#if defined(GOSSAMER_AVX512) && !defined(GOSSAMER_LACKS_FLAGS)
using VectorLane = Avx512;
constexpr int64_t kVectorBytes = 64;
#elif defined(GOSSAMER_AVX2) && !defined(GOSSAMER_LACKS_FLAGS)
using VectorLane = Avx2;
constexpr int64_t kVectorBytes = 32;
#elif defined(GOSSAMER_NEON) && !defined(GOSSAMER_LACKS_FLAGS)
using VectorLane = Neon;
constexpr int64_t kVectorBytes = 16;
#else
using VectorLane = Scalar;
constexpr int64_t kVectorBytes = 16;  // what every 64-bit CPU has (SSE2, NEON)
#endif
}  // namespace gossamer::GOSSAMER_ISA

#define GOSSAMER_JOINED_(a, b) a##b
#define GOSSAMER_JOINED(a, b) GOSSAMER_JOINED_(a, b)
#define GOSSAMER_TEXT_(a) #a
#define GOSSAMER_TEXT(a) GOSSAMER_TEXT_(a)

// Defines <isa>_kernels in the namespace of the folder: the table, of type Kernels, of these functions (base/kernel_tables.h).
#if defined(GOSSAMER_LACKS_FLAGS)
#define GOSSAMER_KERNEL_TABLE(...)                                     \
  extern const Kernels* const GOSSAMER_JOINED(GOSSAMER_ISA, _kernels); \
  const Kernels* const GOSSAMER_JOINED(GOSSAMER_ISA, _kernels) = nullptr
#else
#define GOSSAMER_KERNEL_TABLE(...)                                         \
  static const Kernels table = {GOSSAMER_TEXT(GOSSAMER_ISA), __VA_ARGS__}; \
  extern const Kernels* const GOSSAMER_JOINED(GOSSAMER_ISA, _kernels);     \
  const Kernels* const GOSSAMER_JOINED(GOSSAMER_ISA, _kernels) = &table
#endif
