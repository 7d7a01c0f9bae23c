// What the codec tests share: values in any dtype, inputs of every temper, kernels called on vectors.
// Conversions here are written from the definition, apart from those under test.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "codec/codec.h"
#include "codec/codec_list.h"
#include "sampled.h"

namespace gossamer::test {

using codec::Kernels;
using codec::Kind;
using codec::Rows;
using codec::Spec;
using Bytes = std::vector<uint8_t>;

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16};
#define GOSSAMER_KIND(number, name, Codec) Kind::name,
constexpr Kind kKinds[] = {GOSSAMER_CODECS(GOSSAMER_KIND)};
#undef GOSSAMER_KIND
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Every instruction set that this machine runs, scalar first.
inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> found;
  for (const char* name : {"scalar", "neon", "avx2", "avx512"})
    if (const Kernels* kernels = codec::kernels_by_name(name)) found.push_back(kernels);
  return found;
}

// What the header of a codec says of it.
struct Traits {
  bool has_blocks;
  int64_t block_multiple;
  bool is_stochastic;
};
inline Traits traits_of(Kind kind) {
#define GOSSAMER_TRAITS(number, name, Codec)                                            \
  case Kind::name:                                                                      \
    return {GOSSAMER_ISA::Codec<float>::kStatistics == GOSSAMER_ISA::Statistics::block, \
            GOSSAMER_ISA::Codec<float>::kBlockMultiple, GOSSAMER_ISA::Codec<float>::kStochastic};
  switch (kind) { GOSSAMER_CODECS(GOSSAMER_TRAITS) }
#undef GOSSAMER_TRAITS
  return {};
}
inline bool has_blocks(Kind kind) { return traits_of(kind).has_blocks; }
// `block` rounded up to a block that the kind can have; 1 where it has none.
inline int64_t block_of(Kind kind, int64_t block) {
  const auto [has_blocks, multiple, stochastic] = traits_of(kind);
  return has_blocks ? (block + multiple - 1) / multiple * multiple : 1;
}
inline bool is_stochastic(Kind kind) { return traits_of(kind).is_stochastic; }

// The nearest value with `bits` of significand and no finite value above `largest`, ties to even.
inline double nearest(double x, int bits, int min_exponent, double largest) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - bits, min_exponent));
  const double rounded = std::nearbyint(x / unit) * unit;
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
}
inline double nearest_half(double x) { return nearest(x, 11, -24, 65504.0); }
inline double nearest_bfloat(double x) { return nearest(x, 8, -133, 0x1.fep127); }

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

#if defined(__aarch64__)
using Float16 = __fp16;  // GCC 12 knows _Float16 in C++ on x86 alone
#else
using Float16 = _Float16;
#endif

inline uint16_t half_bits(double x) {
  const Float16 half = static_cast<Float16>(nearest_half(x));
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

inline double get(Dtype dtype, const uint8_t* memory, int64_t i) {
  if (dtype == Dtype::f64) return reinterpret_cast<const double*>(memory)[i];
  if (dtype == Dtype::f32) return reinterpret_cast<const float*>(memory)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(memory)[i];
  if (dtype == Dtype::bf16) return from_bits(uint32_t{bits} << 16);
  Float16 half;
  std::memcpy(&half, &bits, 2);
  return static_cast<double>(half);
}

inline void put(Dtype dtype, uint8_t* memory, int64_t i, double x) {
  if (dtype == Dtype::f64) reinterpret_cast<double*>(memory)[i] = x;
  if (dtype == Dtype::f32) reinterpret_cast<float*>(memory)[i] = static_cast<float>(x);
  if (dtype == Dtype::f16) reinterpret_cast<uint16_t*>(memory)[i] = half_bits(x);
  if (dtype == Dtype::bf16)
    reinterpret_cast<uint16_t*>(memory)[i] =
        static_cast<uint16_t>(to_bits(static_cast<float>(nearest_bfloat(x))) >> 16);
}

template <class T>
Bytes as_bytes(Dtype dtype, const std::vector<T>& values) {
  Bytes memory(values.size() * element_size(dtype));
  for (size_t i = 0; i < values.size(); ++i) put(dtype, memory.data(), static_cast<int64_t>(i), values[i]);
  return memory;
}

inline std::vector<double> as_values(Dtype dtype, const Bytes& memory) {
  std::vector<double> values(memory.size() / element_size(dtype));
  for (size_t i = 0; i < values.size(); ++i) values[i] = get(dtype, memory.data(), static_cast<int64_t>(i));
  return values;
}

// Inputs of every temper a gradient can have.
enum class Temper { ordinary, offset, tiny, huge, denormal, zeros, with_nan, with_inf };
constexpr Temper kTempers[] = {Temper::ordinary, Temper::offset, Temper::tiny,     Temper::huge,
                               Temper::denormal, Temper::zeros,  Temper::with_nan, Temper::with_inf};
constexpr Temper kSomeTempers[] = {Temper::ordinary, Temper::huge, Temper::zeros, Temper::with_nan,
                                   Temper::with_inf};

inline std::vector<float> make_values(int64_t numel, Temper temper, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& x : values) {
    x = normal(random);
    if (temper == Temper::offset) x = 100.0f + 0.01f * x;
    if (temper == Temper::tiny) x *= 1e-35f;
    if (temper == Temper::huge) x *= 1e35f;
    if (temper == Temper::denormal) x = from_bits(to_bits(x) % 5000);
    if (temper == Temper::zeros) x = x > 0 ? 0.0f : -0.0f;
    if (temper == Temper::with_nan && random() % 97 == 0) x = random() % 2 ? kNan : -kNan;
    if (temper == Temper::with_inf && random() % 97 == 0) x = random() % 2 ? kInf : -kInf;
  }
  return values;
}

// make_values() in memory of `dtype`. Kept, because many specs are tried on the same values.
inline const Bytes& random_bytes(Dtype dtype, int64_t numel, Temper temper, unsigned seed) {
  static std::map<std::tuple<Dtype, int64_t, Temper, unsigned>, Bytes> kept;
  const auto [entry, is_new] = kept.try_emplace({dtype, numel, temper, seed});
  if (is_new) entry->second = as_bytes(dtype, make_values(numel, temper, seed));
  return entry->second;
}

// Kernels on vectors. Outputs start as rubbish, so that a byte left unwritten shows.
inline Bytes encode(const Kernels& kernels, const Spec& spec, Dtype source, const Bytes& x,
                    const Rows& rows) {
  Bytes wire(rows.rows * codec::row_bytes(spec, rows.row_numel), 0xab);
  kernels.encode(spec, source, x.data(), rows, wire.data());
  return wire;
}
inline Bytes decode(const Kernels& kernels, const Spec& spec, const Bytes& wire, const Rows& rows) {
  Bytes out(rows.numel * element_size(spec.dtype), 0xab);
  kernels.decode(spec, wire.data(), rows, out.data());
  return out;
}

// The largest magnitude of x[begin, end).
inline float absmax_of(const std::vector<float>& x, size_t begin, size_t end) {
  float absmax = 0;
  for (size_t i = begin; i < end && i < x.size(); ++i) absmax = std::max(absmax, std::fabs(x[i]));
  return absmax;
}

// Encode and decode one row of float32.
inline std::vector<float> round_trip(const Kernels& kernels, const Spec& spec, const std::vector<float>& x) {
  const auto numel = static_cast<int64_t>(x.size());
  const Rows rows{1, numel, numel};
  const Bytes wire = encode(kernels, spec, Dtype::f32, as_bytes(Dtype::f32, x), rows);
  const Bytes out = decode(kernels, spec, wire, rows);
  std::vector<float> values(x.size());
  std::memcpy(values.data(), out.data(), out.size());
  return values;
}

inline std::string describe(const Kernels& kernels, const Spec& spec, const Rows& rows, Temper temper) {
  return std::string(kernels.name) + " codec " + std::to_string(static_cast<int>(spec.kind)) + " dtype " +
         std::to_string(static_cast<int>(spec.dtype)) + " block " + std::to_string(spec.block) + " rows " +
         std::to_string(rows.rows) + " x " + std::to_string(rows.row_numel) + " numel " +
         std::to_string(rows.numel) + " pitch " + std::to_string(rows.pitch) + " temper " +
         std::to_string(static_cast<int>(temper));
}

// Row shapes: empty, one, around blocks of 32 and 256 and around the driver's tile, primes; full and ragged. Some rows are
// columns of a wider matrix.
inline std::vector<Rows> row_shapes() {
  std::vector<Rows> shapes;
  for (int64_t n : {0, 1, 2, 31, 32, 33, 97, 255, 256, 257, 509, 2047, 2048, 2049, 4099}) {
    shapes.push_back({1, n, n});
    shapes.push_back({3, n, 3 * n});
    if (n > 1) shapes.push_back({3, n, 2 * n + 1});
    if (n > 2) shapes.push_back({3, n, n - 1});
  }
  for (int64_t n : {33, 256, 2049}) shapes.push_back({3, n, 2 * (n + 5) + n - 1, n + 5});
  return shapes;
}

// A NaN or Inf at the ends of the second block, or at `place` inside it, turns all of that block into NaN, and no other.
inline void expect_non_finite_values_stay_in_their_block(const Spec& spec, int64_t place) {
  for (const Kernels* kernels : all_kernels())
    for (float poison : {kNan, -kNan, kInf, -kInf, from_bits(0x7f800001)})
      for (int64_t at : {spec.block, place, 2 * spec.block - 1}) {
        auto x = make_values(1000, Temper::ordinary, 11);
        const auto clean = round_trip(*kernels, spec, x);
        x[at] = poison;
        const auto y = round_trip(*kernels, spec, x);
        for (int64_t i = 0; i < 1000; ++i) {
          const bool good = i / spec.block == 1 ? std::isnan(y[i]) : to_bits(y[i]) == to_bits(clean[i]);
          ASSERT_TRUE(good) << kernels->name << " element " << i;
        }
      }
}

}  // namespace gossamer::test
