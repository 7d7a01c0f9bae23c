// The loop that folds buffers, for every pair of element types and every operation. Included once by each cpu_*.cpp, after
// base/instruction_set.h. It checks nothing: reduce.cpp has done that. Free of std:: code: everything here is compiled with
// that file's flags.
//
// A strip of every source is read, in rank order, before that strip is written anywhere: so an out may be a source. There
// is no scalar loop: elements that do not fill a strip are padded on the stack, so that an element's result depends on
// nothing but the element.

#include <cstring>

#include "shm/reduce_kernels.h"
#include "shm/strip.h"

#if !defined(GOSSAMER_LACKS_FLAGS)
namespace gossamer::GOSSAMER_ISA {
namespace {

using shm::Job;
using shm::Kernel;

// Stands for "the job says which operation". Used by one kernel for the rare operations of small floats.
constexpr Op kAsked = static_cast<Op>(-1);

template <Type type>
constexpr bool kIsComplex = type == Type::c32 || type == Type::c64 || type == Type::c128;

// (a + bi)(c + di) = (ac - bd) + (bc + ad)i, as (a, b) * (c, c) + (-b, a) * (d, d). The arithmetic is done on vectors: GCC
// 12 turns a loop over ac - bd, ad + bc into a fused vfmaddsub, despite -ffp-contract=off.
template <class T>
HD Strip<T> complex_product(const Strip<T>& x, const Strip<T>& y) {
  constexpr int64_t numel = Strip<T>::numel;
  alignas(kVectorBytes) T left[numel], right[numel], imaginary[numel];
  memcpy(left, &x, sizeof(x));
  memcpy(right, &y, sizeof(y));
  for (int64_t i = 0; i < numel; i += 2) {
    const T a = left[i];
    left[i] = -left[i + 1];
    left[i + 1] = a;
    imaginary[i] = imaginary[i + 1] = right[i + 1];
    right[i + 1] = right[i];
  }
  Strip<T> turned, c, d;
  memcpy(&turned, left, sizeof(x));
  memcpy(&c, right, sizeof(x));
  memcpy(&d, imaginary, sizeof(x));
  const auto product = [](auto v, auto w) { return v * w; };
  const auto sum = [](auto v, auto w) { return v + w; };
  return each(sum, each(product, x, c), each(product, turned, d));
}

// x and y are vectors of T. Integers wrap.
template <Op op, class T, class V = Vector<T>>
HD V combined(V x, V y) {
  if constexpr (op == Op::product) {
    return x * y;
  } else if constexpr (op == Op::min) {
    return (x < y) | (x != x) ? x : y;  // y where y is NaN, for then x < y is false
  } else if constexpr (op == Op::max) {
    return (x > y) | (x != x) ? x : y;
  } else if constexpr (op == Op::band) {
    return x & y;
  } else if constexpr (op == Op::bor) {
    return x | y;
  } else if constexpr (op == Op::bxor) {
    return x ^ y;
  } else if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) {
    using Wrapping = Vector<std::make_unsigned_t<T>>;
    return (V)((Wrapping)x + (Wrapping)y);
  } else {
    return x + y;
  }
}

// Integers are multiplied as doubles; the product is converted towards zero, saturates, and NaN gives 0.
template <class T>
HD T multiplied(T x, double factor) {
  constexpr T least = static_cast<T>(std::is_signed_v<T> ? T{1} << (8 * sizeof(T) - 1) : 0);
  constexpr T most = static_cast<T>(~least);
  const double y = static_cast<double>(x) * factor;
  // `most` may not be representable as a double; one more than it is, as twice half of that.
  if (y >= 2.0 * static_cast<double>(most / 2 + 1)) return most;
  return y > static_cast<double>(least) ? static_cast<T>(y) : y == y ? least : T{0};
}

template <class T>
HD Strip<T> premultiplied(const Strip<T>& x, double factor) {
  if constexpr (std::is_floating_point_v<T>) {
    return each([factor](auto v) { return v * static_cast<T>(factor); }, x);
  } else {
    const auto multiply = [factor](T* numbers) {
      for (int64_t i = 0; i < Strip<T>::numel; ++i) numbers[i] = multiplied(numbers[i], factor);
    };
    return in_memory(multiply, x);
  }
}

template <class T>
HD Strip<T> divided(const Strip<T>& x, int64_t divisor) {
  if constexpr (std::is_floating_point_v<T>) {
    return each([divisor](auto v) { return v / static_cast<T>(divisor); }, x);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    const auto divide = [divisor](T* numbers) {
      for (int64_t i = 0; i < Strip<T>::numel; ++i)
        numbers[i] = static_cast<T>(static_cast<Wide>(numbers[i]) / static_cast<Wide>(divisor));
    };
    return in_memory(divide, x);
  }
}

template <Op op, class T>
HD Strip<T> combined(const Strip<T>& x, const Strip<T>& y, Op asked) {
  if constexpr (op == kAsked) {
    switch (asked) {
      case Op::product: return combined<Op::product>(x, y, asked);
      case Op::min: return combined<Op::min>(x, y, asked);
      case Op::max: return combined<Op::max>(x, y, asked);
      default: return combined<Op::sum>(x, y, asked);
    }
  } else {
    return each([](auto v, auto w) { return combined<op, T>(v, w); }, x, y);
  }
}

// The result of one strip; `read(k)` gives the strip of source k.
template <Type type, Op op, class Read>
HD auto folded(const Job& job, Read read) {
  const auto factored = [&](int k) {
    const auto x = read(k);
    if constexpr (op == Op::premul_sum || op == kAsked)
      if (op == Op::premul_sum || job.factors != nullptr) return premultiplied(x, job.factors[k]);
    return x;
  };
  auto x = factored(0);
  using T = typename decltype(x)::Number;
  for (int k = 1; k < job.source_count; ++k) {
    if constexpr (kIsComplex<type> && op == Op::product)
      x = complex_product(x, factored(k));
    else
      x = combined<op>(x, factored(k), job.op);
  }
  if constexpr (op == Op::avg || op == kAsked || (op == Op::sum && std::is_floating_point_v<T>))
    if (job.divisor != 1) x = divided(x, job.divisor);
  return x;
}

// Copies what an Element's `store` wrote, in pieces no larger than its stores: a larger load would stall.
template <int64_t bytes, int64_t piece>
HD void copy_strip(char* to, const char* from) {
  for (int64_t i = 0; i < bytes; i += piece) memcpy(to + i, from + i, piece);
}

template <Type from, Type to, Op op>
void run(const Job& job) {
  using Source = Element<from>;
  using Out = Element<to>;
  constexpr int64_t strip = Strip<typename Source::Number>::numel;
  const auto source = [&](int k, int64_t i) {
    return static_cast<const char*>(job.sources[k]) + i * Source::kBytes;
  };
  const auto out = [&](int k, int64_t i) { return static_cast<char*>(job.outs[k]) + i * Out::kBytes; };

  for (int64_t i = 0; i < job.numel; i += strip) {
    const int64_t left = job.numel - i;
    const auto x = folded<from, op>(job, [&](int k) {
      if (left >= strip) return Source::load(source(k, i));
      alignas(kVectorBytes) char padded[strip * Source::kBytes] = {};
      memcpy(padded, source(k, i), left * Source::kBytes);
      return Source::load(padded);
    });
    const bool is_converted = Out::kBytes != sizeof(typename Out::Number);
    if (left >= strip && (!is_converted || job.out_count == 1)) {
      for (int k = 0; k < job.out_count; ++k) Out::store(out(k, i), x);
      continue;
    }
    alignas(kVectorBytes) char coded[strip * Out::kBytes];  // once for all outs
    Out::store(coded, x);
    for (int k = 0; k < job.out_count; ++k) {
      if (left >= strip)
        copy_strip<sizeof(coded), sizeof(coded) / 4>(out(k, i), coded);
      else
        memcpy(out(k, i), coded, left * Out::kBytes);
    }
  }
}

// The choice of a kernel. reduce.cpp asks for only a few of the combinations that reduce.h allows. Its `simplified` turns
// bitwise operations into those of bytes, signed sums into unsigned ones, an average of floats into a sum with a divisor,
// and all operations on complex numbers but products into operations on their parts.

template <Type from, Type to, Op... ops>
Kernel among(Op op) {
  Kernel found = nullptr;
  ((op == ops ? void(found = run<from, to, ops>) : void()), ...);
  return found;
}

template <Type type>
Kernel of_integer(Op op) {
  // These gain little from a wider instruction set: they divide, or convert from double, one number at a time.
  if constexpr (VectorLane::width == 1)
    if (const Kernel found = among<type, type, Op::avg, Op::premul_sum>(op)) return found;
  using T = typename Element<type>::Number;
  if constexpr (type == Type::u8)
    return among<type, type, Op::sum, Op::product, Op::min, Op::max, Op::band, Op::bor, Op::bxor>(op);
  else if constexpr (std::is_signed_v<T>)
    return among<type, type, Op::min, Op::max>(op);
  else
    return among<type, type, Op::sum, Op::product, Op::min, Op::max>(op);
}

template <Type type>
Kernel of_floats(Op op) {
  return among<type, type, Op::sum, Op::product, Op::min, Op::max, Op::premul_sum>(op);
}

template <Type from, Type to>
Kernel of_narrow(Op op) {
  constexpr bool is_usual = sizeof(Half) <= Element<from>::kBytes && sizeof(Half) <= Element<to>::kBytes;
  if constexpr (kIsComplex<from>) {
    return among<from, to, Op::product>(op);
  } else {
    if constexpr (is_usual)
      if (op == Op::sum) return run<from, to, Op::sum>;
    return run<from, to, kAsked>;
  }
}

// Kernels for floats of type `narrow` that are summed as `wide`; `from`, `to` or both are narrow.
template <Type narrow, Type wide>
Kernel of_narrow(Type from, Type to, Op op) {
  if (from == wide) return of_narrow<wide, narrow>(op);
  return to == wide ? of_narrow<narrow, wide>(op) : of_narrow<narrow, narrow>(op);
}

Kernel find(Type from, Type to, Op op) {
  switch (from == Type::f32 || from == Type::c64 ? to : from) {
    case Type::u8: return of_integer<Type::u8>(op);
    case Type::i8: return of_integer<Type::i8>(op);
    case Type::u16: return of_integer<Type::u16>(op);
    case Type::i16: return of_integer<Type::i16>(op);
    case Type::u32: return of_integer<Type::u32>(op);
    case Type::i32: return of_integer<Type::i32>(op);
    case Type::u64: return of_integer<Type::u64>(op);
    case Type::i64: return of_integer<Type::i64>(op);
    case Type::boolean: return among<Type::boolean, Type::boolean, Op::band, Op::bor, Op::bxor>(op);
    case Type::f16: return of_narrow<Type::f16, Type::f32>(from, to, op);
    case Type::bf16: return of_narrow<Type::bf16, Type::f32>(from, to, op);
    case Type::f32: return of_floats<Type::f32>(op);
    case Type::f64: return of_floats<Type::f64>(op);
    case Type::e4m3fn: return of_narrow<Type::e4m3fn, Type::f32>(from, to, op);
    case Type::e4m3fnuz: return of_narrow<Type::e4m3fnuz, Type::f32>(from, to, op);
    case Type::e5m2: return of_narrow<Type::e5m2, Type::f32>(from, to, op);
    case Type::e5m2fnuz: return of_narrow<Type::e5m2fnuz, Type::f32>(from, to, op);
    case Type::c32: return of_narrow<Type::c32, Type::c64>(from, to, op);
    case Type::c64: return among<Type::c64, Type::c64, Op::product>(op);
    case Type::c128: return among<Type::c128, Type::c128, Op::product>(op);
  }
  return nullptr;
}

}  // namespace
}  // namespace gossamer::GOSSAMER_ISA
#endif

namespace gossamer::shm {
GOSSAMER_KERNEL_TABLE(GOSSAMER_ISA::find);
}  // namespace gossamer::shm
