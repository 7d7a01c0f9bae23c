// What a reduction should give, from a reference that knows no vectors: small floats are decoded and encoded
// by ldexp, integers are added in 128 bits. With random inputs for every element type, and a comparison that
// lets a sum choose its NaN. Included by test_reduce.cpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "shm/reduce.h"

namespace gossamer::test::reference {

using shm::Fold;
using shm::Op;
using shm::Type;
using Bytes = std::vector<uint8_t>;

// The reference: small floats.

struct Format {
  int bytes, mantissa_bits, least_exponent;  // least: that of normal numbers
  double largest;
  uint32_t overflow, nan;  // codes without sign
  bool is_fnuz;            // no -0; the sign alone is NaN
};

inline Format format(Type type) {
  switch (type) {
    case Type::f16: return {2, 10, -14, 65504, 0x7c00, 0x7e00, false};
    case Type::bf16: return {2, 7, -126, 0x1.fep127, 0x7f80, 0x7fc0, false};
    case Type::e4m3fn: return {1, 3, -6, 448, 0x7e, 0x7f, false};
    case Type::e4m3fnuz: return {1, 3, -7, 240, 0x80, 0x80, true};
    case Type::e5m2: return {1, 2, -14, 57344, 0x7c, 0x7e, false};
    default: return {1, 2, -15, 57344, 0x80, 0x80, true};
  }
}

inline double decoded(Type type, uint32_t code) {
  const Format f = format(type);
  const uint32_t sign = 1u << (8 * f.bytes - 1), magnitude = code & (sign - 1);
  const int exponent = static_cast<int>(magnitude >> f.mantissa_bits);
  double x = magnitude & ((1u << f.mantissa_bits) - 1);
  if (exponent > 0) x += 1u << f.mantissa_bits;
  x = std::ldexp(x, std::max(exponent, 1) - 1 + f.least_exponent - f.mantissa_bits);
  if (f.is_fnuz && code == sign) return std::numeric_limits<double>::quiet_NaN();
  if (x > f.largest)
    x = magnitude == f.overflow && f.overflow != f.nan ? std::numeric_limits<double>::infinity()
                                                       : std::numeric_limits<double>::quiet_NaN();
  return code & sign ? -x : x;
}

inline uint32_t encoded(Type type, double x) {
  const Format f = format(type);
  if (std::isnan(x)) return f.nan;
  const uint32_t sign = std::signbit(x) ? 1u << (8 * f.bytes - 1) : 0;
  int exponent = f.least_exponent;
  if (x != 0 && std::isfinite(x)) exponent = std::max(std::ilogb(x), f.least_exponent);
  const double units = std::nearbyint(std::ldexp(std::fabs(x), f.mantissa_bits - exponent));
  if (std::ldexp(units, exponent - f.mantissa_bits) > f.largest) return f.overflow | sign;
  const auto code =
      (static_cast<uint32_t>(exponent - f.least_exponent) << f.mantissa_bits) + static_cast<uint32_t>(units);
  return f.is_fnuz && code == 0 ? 0 : code | sign;
}

// The reference: one number from n. T is float, double, or an integer type.

template <class T>
T from_wide(__int128 x) {
  return static_cast<T>(static_cast<unsigned __int128>(x));
}

template <class T>
T multiplied(T x, double factor) {
  if constexpr (std::is_floating_point_v<T>) return x * static_cast<T>(factor);
  const long double y = static_cast<double>(x) * factor;
  if (std::isnan(y)) return 0;
  if (y >= std::numeric_limits<T>::max()) return std::numeric_limits<T>::max();
  if (y <= std::numeric_limits<T>::min()) return std::numeric_limits<T>::min();
  return static_cast<T>(y);
}

template <class T>
T combined(Op op, T x, T y) {
  constexpr bool is_float = std::is_floating_point_v<T>;
  if (op == Op::min || op == Op::max) {
    if constexpr (is_float)
      if (std::isnan(x) || std::isnan(y)) return static_cast<T>(std::numeric_limits<double>::quiet_NaN());
    return (op == Op::min ? x < y : x > y) ? x : y;
  }
  if constexpr (is_float) {
    return op == Op::product ? x * y : x + y;
  } else {
    if (op == Op::band) return x & y;
    if (op == Op::bor) return x | y;
    if (op == Op::bxor) return x ^ y;
    if (op == Op::product) return static_cast<T>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
    return from_wide<T>(static_cast<__int128>(x) + y);
  }
}

template <class T>
T folded(const Fold& r, std::vector<T> x) {
  if (r.op == Op::premul_sum && r.factors != nullptr)
    for (size_t k = 0; k < x.size(); ++k) x[k] = multiplied(x[k], r.factors[k]);
  T result = x[0];
  for (size_t k = 1; k < x.size(); ++k) result = combined(r.op, result, x[k]);
  if (r.op == Op::avg) result = static_cast<T>(result / static_cast<T>(r.divisor));
  return result;
}

inline uint8_t folded_booleans(Op op, const std::vector<uint8_t>& x) {
  bool result = x[0] != 0;
  for (size_t k = 1; k < x.size(); ++k) {
    const bool y = x[k] != 0;
    if (op == Op::sum || op == Op::max || op == Op::bor)
      result = result || y;
    else
      result = op == Op::bxor ? result != y : result && y;
  }
  return result;
}

// The reference: buffers.

template <class T>
T at(const void* p, int64_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(p) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return x;
}
template <class T>
void put(void* p, int64_t i, T x) {
  std::memcpy(static_cast<char*>(p) + i * static_cast<int64_t>(sizeof(T)), &x, sizeof(T));
}

inline Type parts_of(Type type) {
  return type == Type::c32    ? Type::f16
         : type == Type::c64  ? Type::f32
         : type == Type::c128 ? Type::f64
                              : type;
}
inline bool is_complex(Type type) { return parts_of(type) != type; }
inline bool is_integer(Type type) { return type < Type::boolean; }

inline double number(Type type, const void* p, int64_t i) {
  if (type == Type::f64) return at<double>(p, i);
  if (type == Type::f32) return at<float>(p, i);
  return decoded(type, format(type).bytes == 2 ? at<uint16_t>(p, i) : at<uint8_t>(p, i));
}
inline void put_number(Type type, void* p, int64_t i, double x) {
  if (type == Type::f64) return put(p, i, x);
  if (type == Type::f32) return put(p, i, static_cast<float>(x));
  if (format(type).bytes == 2) return put(p, i, static_cast<uint16_t>(encoded(type, x)));
  put(p, i, static_cast<uint8_t>(encoded(type, x)));
}

template <class T>
void refer_floats(Fold r, const std::vector<const void*>& sources, void* out, int64_t numel) {
  const bool product = is_complex(r.from) && r.op == Op::product;
  numel *= is_complex(r.from) ? 2 : 1;
  r.from = parts_of(r.from), r.to = parts_of(r.to);
  for (int64_t i = 0; i < numel; ++i) {
    std::vector<T> x;
    for (const void* s : sources) x.push_back(static_cast<T>(number(r.from, s, i)));
    if (!product) {
      put_number(r.to, out, i, folded(r, x));
    } else if (i % 2 == 0) {
      T re = x[0], im = static_cast<T>(number(r.from, sources[0], i + 1));
      for (size_t k = 1; k < x.size(); ++k) {
        const T c = x[k], d = static_cast<T>(number(r.from, sources[k], i + 1)), re_before = re;
        re = re * c - im * d;
        im = re_before * d + im * c;
      }
      put_number(r.to, out, i, re);
      put_number(r.to, out, i + 1, im);
    }
  }
}

template <class T>
void refer_integers(const Fold& r, const std::vector<const void*>& sources, void* out, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    std::vector<T> x;
    for (const void* s : sources) x.push_back(at<T>(s, i));
    if constexpr (std::is_same_v<T, uint8_t>)
      if (r.from == Type::boolean) {
        put(out, i, folded_booleans(r.op, x));
        continue;
      }
    put(out, i, folded(r, x));
  }
}

inline void refer(const Fold& r, const std::vector<const void*>& sources, void* out, int64_t numel) {
  switch (r.from) {
    case Type::boolean:
    case Type::u8: return refer_integers<uint8_t>(r, sources, out, numel);
    case Type::i8: return refer_integers<int8_t>(r, sources, out, numel);
    case Type::u16: return refer_integers<uint16_t>(r, sources, out, numel);
    case Type::i16: return refer_integers<int16_t>(r, sources, out, numel);
    case Type::u32: return refer_integers<uint32_t>(r, sources, out, numel);
    case Type::i32: return refer_integers<int32_t>(r, sources, out, numel);
    case Type::u64: return refer_integers<uint64_t>(r, sources, out, numel);
    case Type::i64: return refer_integers<int64_t>(r, sources, out, numel);
    case Type::f64:
    case Type::c128: return refer_floats<double>(r, sources, out, numel);
    default: return refer_floats<float>(r, sources, out, numel);
  }
}

// Inputs and comparisons.

inline Bytes random_elements(Type type, int64_t numel, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(numel * shm::element_size(type));
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random());  // every code: NaN, Inf, denormals
  if (type == Type::boolean)
    for (auto& byte : bytes) byte = byte % 3 == 0 ? byte : byte % 2;
  const Type part = parts_of(type);
  if (part != Type::f32 && part != Type::f64) return bytes;
  const double specials[] = {0.0,
                             -0.0,
                             std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN(),
                             1e-40,
                             3e38,
                             -3e38,
                             5e-324,
                             1e308};
  for (int64_t i = 0; i < static_cast<int64_t>(bytes.size()) / shm::element_size(part); ++i) {
    const double x = std::ldexp(static_cast<double>(static_cast<int64_t>(random())), -70 + random() % 16);
    put_number(part, bytes.data(), i, random() % 16 ? x : specials[random() % 10]);
  }
  return bytes;
}

// A NaN equals any NaN in types whose NaNs have a payload: which of two NaNs a sum keeps is the CPU's choice.
inline void expect_equal(Type type, const void* got, const void* want, int64_t numel,
                         const std::string& what) {
  if (std::memcmp(got, want, numel * shm::element_size(type)) == 0) return;
  const Type part = parts_of(type);
  if (is_integer(part) || part == Type::boolean) FAIL() << what;
  const int64_t size = shm::element_size(part);
  for (int64_t i = 0; i < numel * shm::element_size(type) / size; ++i) {
    const auto *x = static_cast<const char*>(got) + i * size, *y = static_cast<const char*>(want) + i * size;
    const double a = number(part, x, 0), b = number(part, y, 0);
    const bool both_nan = size >= 4 && std::isnan(a) && std::isnan(b);
    ASSERT_TRUE(both_nan || std::memcmp(x, y, size) == 0)
        << what << ": part " << i << " " << a << " != " << b;
  }
}

}  // namespace gossamer::test::reference
