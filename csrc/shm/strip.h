// A strip: four vector registers of numbers, and how each element type is loaded into and stored from them. Vectors are the
// compiler's (GCC, Clang), of the width that the including file sets (kVectorBytes). 16-bit floats go through VectorLane if
// it has instructions for them. Included by reduce_kernels.inl alone.
#pragma once

#include <type_traits>

#include "shm/minifloat.h"
#include "shm/reduce.h"

namespace gossamer::GOSSAMER_ISA {
namespace {

using shm::Op;
using shm::Type;

template <class T, int64_t lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * lanes)));
};
template <class T, int64_t lanes = kVectorBytes / sizeof(T)>
using Vector = typename VectorOf<T, lanes>::type;

template <class T>
struct Strip {
  using Number = T;
  static constexpr int64_t numel = 4 * kVectorBytes / sizeof(T);
  Vector<T> a, b, c, d;
};

template <class T, class F>
HD Strip<T> each(F f, const Strip<T>& x) {
  return {f(x.a), f(x.b), f(x.c), f(x.d)};
}
template <class T, class F>
HD Strip<T> each(F f, const Strip<T>& x, const Strip<T>& y) {
  return {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)};
}

// For operations without a vector form: `f(array)` changes the numbers of a strip in memory.
template <class T, class F>
HD Strip<T> in_memory(F f, const Strip<T>& x) {
  alignas(kVectorBytes) T numbers[Strip<T>::numel];
  memcpy(numbers, &x, sizeof(x));
  f(numbers);
  Strip<T> changed;
  memcpy(&changed, numbers, sizeof(x));
  return changed;
}

// An element type: what it is computed in (Number), its bytes in memory, and the moves of one strip.

template <class T>
struct Plain {
  using Number = T;
  static constexpr int64_t kBytes = sizeof(T);

  static HD Strip<T> load(const char* from) {
    return {get(from), get(from + kVectorBytes), get(from + 2 * kVectorBytes), get(from + 3 * kVectorBytes)};
  }
  static HD void store(char* to, const Strip<T>& x) {
    put(to, x.a);
    put(to + kVectorBytes, x.b);
    put(to + 2 * kVectorBytes, x.c);
    put(to + 3 * kVectorBytes, x.d);
  }

 private:  // vector by vector: GCC 12 copies a whole strip in pieces of 16 bytes
  static HD Vector<T> get(const char* from) {
    Vector<T> x;
    memcpy(&x, from, sizeof(x));
    return x;
  }
  static HD void put(char* to, Vector<T> x) { memcpy(to, &x, sizeof(x)); }
};

struct Boolean : Plain<uint8_t> {
  static HD Strip<uint8_t> load(const char* from) {
    return each([](auto x) { return (decltype(x))(x != 0) & uint8_t{1}; }, Plain<uint8_t>::load(from));
  }
};

// A float of 8 or 16 bits by integer arithmetic, in loops that the compiler vectorises. The loops are out of line, so that
// all kernels share one copy.
template <class Format, class Code>
struct Narrow {
  using Number = float;
  static constexpr int64_t kBytes = sizeof(Code);

  static HD Strip<float> load(const char* from) {
    alignas(kVectorBytes) float numbers[kNumel];
    decode(from, numbers);
    return Plain<float>::load(reinterpret_cast<const char*>(numbers));
  }
  static HD void store(char* to, const Strip<float>& x) {
    alignas(kVectorBytes) float numbers[kNumel];
    Plain<float>::store(reinterpret_cast<char*>(numbers), x);
    encode(numbers, to);
  }

 private:
  static constexpr int64_t kNumel = Strip<float>::numel;

  static __attribute__((noinline)) void decode(const char* __restrict from, float* __restrict numbers) {
    for (int64_t i = 0; i < kNumel; ++i) {
      Code code;
      memcpy(&code, from + i * kBytes, kBytes);
      numbers[i] = Format::decode(code);
    }
  }
  static __attribute__((noinline)) void encode(const float* __restrict numbers, char* __restrict to) {
    for (int64_t i = 0; i < kNumel; ++i) {
      const auto code = static_cast<Code>(Format::encode(numbers[i]));
      memcpy(to + i * kBytes, &code, kBytes);
    }
  }
};

// A 16-bit float by the CPU's instructions. T is Half or Bfloat; a lane is a strip or half of one.
template <class T>
struct Converted {
  using Number = float;
  using Lane = VectorLane;
  static constexpr int64_t kBytes = sizeof(T);

  static HD Strip<float> load(const char* from) {
    const auto* p = reinterpret_cast<const T*>(from);
    const auto x = Lane::load(p);
    if constexpr (Strip<float>::numel == Lane::width) {
      return {x.a, x.b, x.c, x.d};
    } else {
      const auto y = Lane::load(p + Lane::width);
      return {x.a, x.b, y.a, y.b};
    }
  }
  static HD void store(char* to, const Strip<float>& x) {
    auto* p = reinterpret_cast<T*>(to);
    if constexpr (Strip<float>::numel == Lane::width) {
      Lane::store(p, {x.a, x.b, x.c, x.d});
    } else {
      Lane::store(p, {x.a, x.b});
      Lane::store(p + Lane::width, {x.c, x.d});
    }
  }
};

template <class T, class Format>
using Float16Bits = std::conditional_t<(VectorLane::width > 1), Converted<T>, Narrow<Format, uint16_t>>;

// The element of `type`; for a complex number, the element of its parts.
template <Type type>
constexpr auto element() {
  if constexpr (type == Type::u8) return Plain<uint8_t>{};
  if constexpr (type == Type::i8) return Plain<int8_t>{};
  if constexpr (type == Type::u16) return Plain<uint16_t>{};
  if constexpr (type == Type::i16) return Plain<int16_t>{};
  if constexpr (type == Type::u32) return Plain<uint32_t>{};
  if constexpr (type == Type::i32) return Plain<int32_t>{};
  if constexpr (type == Type::u64) return Plain<uint64_t>{};
  if constexpr (type == Type::i64) return Plain<int64_t>{};
  if constexpr (type == Type::boolean) return Boolean{};
  if constexpr (type == Type::f16) return Float16Bits<Half, Float16>{};
  if constexpr (type == Type::bf16) return Float16Bits<Bfloat, Bfloat16>{};
  if constexpr (type == Type::f32) return Plain<float>{};
  if constexpr (type == Type::f64) return Plain<double>{};
  if constexpr (type == Type::e4m3fn) return Narrow<Float8E4m3fn, uint8_t>{};
  if constexpr (type == Type::e4m3fnuz) return Narrow<Float8E4m3fnuz, uint8_t>{};
  if constexpr (type == Type::e5m2) return Narrow<Float8E5m2, uint8_t>{};
  if constexpr (type == Type::e5m2fnuz) return Narrow<Float8E5m2fnuz, uint8_t>{};
  if constexpr (type == Type::c32) return Float16Bits<Half, Float16>{};
  if constexpr (type == Type::c64) return Plain<float>{};
  if constexpr (type == Type::c128) return Plain<double>{};
}
template <Type type>
using Element = decltype(element<type>());

}  // namespace
}  // namespace gossamer::GOSSAMER_ISA
