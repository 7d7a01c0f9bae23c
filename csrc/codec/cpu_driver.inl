// The loops that run a codec's arithmetic over memory, on the CPU. No arithmetic of its own beyond sums. Included once by
// each cpu_*.cpp, after base/instruction_set.h. Free of std:: code: everything here is compiled with that file's flags.

#include <cstdlib>
#include <cstring>

#include "codec/codec.h"
#include "codec/codec_list.h"
#include "codec/noise.h"

#if !defined(GOSSAMER_LACKS_FLAGS)
namespace gossamer::GOSSAMER_ISA {
namespace {

using codec::Rows;
using codec::Spec;
using codec::WireRows;

constexpr int64_t kTile = 2048;  // elements that are handled at a time: 8 KiB of float32 stay in L1
constexpr int64_t kGroupsAtOnce = kTile / 32;

template <class Codec>
using LaneOf = std::conditional_t<std::is_same_v<typename Codec::Value, double>, Double, VectorLane>;

template <class Body>
void dispatch(const Spec& spec, Body body) {
  switch (spec.kind) { GOSSAMER_CODECS(GOSSAMER_CASE_CODEC) }
}

// Where the parts of a wire row lie.
template <class Codec>
struct Layout {
  int64_t row_numel, group, header_bytes, row_bytes;

  Layout(const Spec& spec, int64_t row_numel)
      : row_numel(row_numel),
        group(group_numel<Codec>(row_numel, spec.block)),
        header_bytes(Codec::header_bytes(row_numel, spec.block)),
        row_bytes(codec::row_bytes(spec, row_numel)) {}

  // The byte of code i, where code i is the first of its byte.
  template <class Byte>
  auto codes(Byte* row, int64_t i) const {
    using Code = std::conditional_t<std::is_const_v<Byte>, const typename Codec::Code, typename Codec::Code>;
    return reinterpret_cast<Code*>(row + header_bytes + code_bytes<Codec>(i));
  }
};

// Code i, or a lane of codes from it. `codes` is the byte of the first code, from which i counts.
template <class Codec, class Lane>
HD auto load_codes(const typename Codec::Code* codes, int64_t i) {
  if constexpr (Codec::kCodeBits < 8)
    return Lane::template load_packed<Codec::kCodeBits>(codes, i);
  else
    return Lane::load(codes + i);
}

template <class Codec, class Lane, class Value>
HD void store_codes(typename Codec::Code* codes, int64_t i, Value x) {
  if constexpr (Codec::kCodeBits < 8)
    Lane::template store_packed<Codec::kCodeBits>(codes, i, x);
  else
    Lane::store(codes + i, x);
}

template <class Codec, class Lane, class Source>
HD typename Lane::F load_value(const Source* x) {
  const auto value = Lane::load(x);
  if constexpr (Codec::kRoundsFirst && !std::is_same_v<Source, typename Codec::Tensor>)
    return Lane::rounded(value, typename Codec::Tensor{});
  else
    return value;
}

template <class Codec, class Source>
HD auto observe(const Source* x, int64_t count) {
  using Lane = LaneOf<Codec>;
  auto wide = Codec::template nothing<Lane>();
  int64_t i = 0;
  for (; i + Lane::width <= count; i += Lane::width)
    wide = Codec::template observe<Lane>(wide, load_value<Codec, Lane>(x + i));
  auto stats = Codec::template collapse<Lane>(wide);
  for (; i < count; ++i) stats = Codec::template observe<Scalar>(stats, load_value<Codec, Scalar>(x + i));
  return stats;
}

// Sums in the order that layout.h defines.
template <class Codec, class Source>
HD Sum summed(const Source* x, int64_t count) {
  using Lane = LaneOf<Codec>;
  using Tail = typename Lane::Tail;
  if (count == kPartialSums) {  // the usual block: each partial sum is one element
    typename Codec::Value summands[kPartialSums];
    for (int64_t i = 0; i < count; i += Lane::width)
      Lane::store(summands + i, Codec::template summand<Lane>(load_value<Codec, Lane>(x + i)));
    return {Lane::sum_in_order(summands), count};
  }
  double partial[kPartialSums] = {};
  int64_t i = 0;
  for (; i + Lane::width <= count; i += Lane::width)
    Lane::add_to(partial + i % kPartialSums, Codec::template summand<Lane>(load_value<Codec, Lane>(x + i)));
  for (; i < count; ++i)
    Tail::add_to(partial + i % kPartialSums, Codec::template summand<Tail>(load_value<Codec, Tail>(x + i)));
  return {Lane::sum_in_order(partial), count};
}

template <class Codec, class Source>
HD auto statistics_of(const Source* x, int64_t count) {
  if constexpr (Codec::kSummed)
    return summed<Codec>(x, count);
  else
    return observe<Codec>(x, count);
}

template <class Codec, class Stats>
HD typename Codec::Params params_of(const Stats& stats, const Noise& noise) {
  if constexpr (Codec::kStochastic)
    return Codec::finish(stats, noise.on);
  else
    return Codec::finish(stats);
}

// Codes of a lane, which begins with element `begin + i` of a row: rounded by random numbers, or to nearest without noise.
template <class Codec, bool kNoise, class Lane, class Source>
HD void quantise_lane(typename Codec::Params params, const Source* x, int64_t begin, int64_t i, Noise noise,
                      typename Codec::Code* codes) {
  const auto value = load_value<Codec, Lane>(x + i);
  if constexpr (kNoise)
    store_codes<Codec, Lane>(
        codes, i,
        Codec::template quantise<Lane>(params, value, Lane::drawn(noise.first, noise.second, begin + i)));
  else
    store_codes<Codec, Lane>(codes, i, Codec::template quantise<Lane>(params, value));
}

// Codes of the elements from `begin` of a row.
template <class Codec, bool kNoise, class Source>
HD void quantise(typename Codec::Params params, const Source* x, int64_t begin, int64_t count, Noise noise,
                 typename Codec::Code* codes) {
  using Lane = LaneOf<Codec>;
  int64_t i = 0;
  for (; i + Lane::width <= count; i += Lane::width)
    quantise_lane<Codec, kNoise, Lane>(params, x, begin, i, noise, codes);
  for (; i < count; ++i) quantise_lane<Codec, kNoise, typename Lane::Tail>(params, x, begin, i, noise, codes);
}

// The same by random numbers, for groups of one lane each. No group has a loop or a call of its own, so constants stay in
// registers.
template <class Codec, class Source>
HD void quantise_lanes(const typename Codec::Params* params, const Source* x, int64_t begin, int64_t groups,
                       Noise noise, typename Codec::Code* codes) {
  using Lane = LaneOf<Codec>;
  for (int64_t g = 0; g < groups; ++g)
    quantise_lane<Codec, true, Lane>(params[g], x, begin, g * Lane::width, noise, codes);
}

template <class Codec>
bool any_blank(const typename Codec::Params* params, int64_t groups) {
  bool any = false;
  for (int64_t g = 0; g < groups; ++g) any |= Codec::is_blank(params[g]);
  return any;
}

// Elements [begin, begin + count) of one row; begin lies on a group.
template <class Codec, class Source>
void encode_range(const Layout<Codec>& layout, const Source* x, int64_t begin, int64_t count,
                  const Noise& noise, uint8_t* row) {
  auto* codes = layout.codes(row, begin);
  if constexpr (Codec::kRaw && std::is_same_v<Source, typename Codec::Tensor>) {
    memcpy(codes, x, count * sizeof(*x));
  } else if constexpr (Codec::kStatistics == Statistics::none) {
    quantise<Codec, false>({}, x, begin, count, noise, codes);
  } else {
    // One step for the groups of a tile, then the next step for them: the processor works on several groups at a time, and
    // the constants of one step stay in registers.
    decltype(statistics_of<Codec>(x, count)) stats[kGroupsAtOnce];
    typename Codec::Params params[kGroupsAtOnce];
    int64_t group = begin / layout.group;  // counted on: a division for each group takes time
    const int64_t fit = layout.group < kTile ? kTile / layout.group : 1;
    const int64_t at_once = fit < kGroupsAtOnce ? fit : kGroupsAtOnce;
    for (int64_t first = 0; first < count; first += at_once * layout.group) {
      int64_t groups = 0, last = first;  // the last may be short
      for (; groups < at_once && last < count; last += layout.group, ++groups)
        stats[groups] =
            statistics_of<Codec>(x + last, count - last < layout.group ? count - last : layout.group);
      for (int64_t g = 0; g < groups; ++g) {
        params[g] = params_of<Codec>(stats[g], noise);
        Codec::write(params[g], row, group++);
      }
      if constexpr (Codec::kStochastic)
        if (noise.on && layout.group == LaneOf<Codec>::width && last <= count &&
            !any_blank<Codec>(params, groups)) {
          quantise_lanes<Codec>(params, x + first, begin + first, groups, noise,
                                layout.codes(row, begin + first));
          continue;
        }
      for (int64_t g = 0, done = first; g < groups; ++g, done += layout.group) {
        const int64_t n = count - done < layout.group ? count - done : layout.group;
        auto* group_codes = layout.codes(row, begin + done);
        if (Codec::is_blank(params[g]))
          memset(group_codes, 0, code_bytes<Codec>(n));
        else if (Codec::kStochastic && noise.on)
          quantise<Codec, Codec::kStochastic>(params[g], x + done, begin + done, n, noise, group_codes);
        else
          quantise<Codec, false>(params[g], x + done, begin + done, n, noise, group_codes);
      }
    }
  }
}

// Zeroes the bytes of a row of `valid` elements that nothing else writes. Runs before the header is written.
template <class Codec>
void clear_unused(const Layout<Codec>& layout, int64_t valid, uint8_t* row) {
  memset(row, 0, layout.header_bytes);
  uint8_t* end = row + layout.header_bytes + code_bytes<Codec>(valid);
  memset(end, 0, row + layout.row_bytes - end);
}

template <class Codec, bool kAdd, class Out>
void dequantise(typename Codec::Params params, const typename Codec::Code* codes, int64_t count, Out* out) {
  using Lane = LaneOf<Codec>;
  using Tail = typename Lane::Tail;
  const auto put = [&](auto lane, int64_t i) {
    using L = decltype(lane);
    const auto x = Codec::template dequantise<L>(params, load_codes<Codec, L>(codes, i));
    if constexpr (kAdd)
      L::add_to(out + i, x);
    else
      L::store(out + i, x);
  };
  int64_t i = 0;
  for (; i + Lane::width <= count; i += Lane::width) put(Lane{}, i);
  for (; i < count; ++i) put(Tail{}, i);
}

// Decodes elements [begin, begin + count) of one row and stores them in out[0, count), or adds them.
template <class Codec, bool kAdd, class Out>
void decode_range(const Layout<Codec>& layout, const uint8_t* row, int64_t begin, int64_t count, Out* out) {
  if constexpr (Codec::kRaw && !kAdd) {
    memcpy(out, layout.codes(row, begin), count * sizeof(*out));
  } else {
    int64_t group = begin / layout.group;
    for (int64_t done = 0; done < count; ++group) {
      const int64_t end = (group + 1) * layout.group - begin;
      const int64_t n = (end < count ? end : count) - done;
      dequantise<Codec, kAdd>(Codec::read(row, group), layout.codes(row, begin + done), n, out + done);
      done += n;
    }
  }
}

// sums[0, count) += elements [begin, begin + count) of every row, in row order.
template <class Codec>
void add_rows(const Layout<Codec>& layout, const WireRows& wire, int64_t rows, int64_t begin, int64_t count,
              Accumulate<typename Codec::Tensor>* sums) {
  for (int64_t done = 0; done < count; done += kTile) {
    const int64_t n = count - done < kTile ? count - done : kTile;
    for (int64_t r = 0; r < rows; ++r)
      decode_range<Codec, true>(layout, wire.row(r, layout.row_bytes), begin + done, n, sums + done);
  }
}

// error[0, count) += x.
template <class Lane, class Source, class Sum>
void add_to_error(const Source* x, int64_t count, Sum* error) {
  using Tail = typename Lane::Tail;
  int64_t i = 0;
  for (; i + Lane::width <= count; i += Lane::width) Lane::add_to(error + i, Lane::load(x + i));
  for (; i < count; ++i) Tail::add_to(error + i, Tail::load(x + i));
}

// keep(i, rest) for elements [begin, begin + count) of a row; rest is what the row leaves out of values[i].
template <class Codec, class Sum, class Keep>
void each_rest(const Layout<Codec>& layout, const uint8_t* row, int64_t begin, int64_t count,
               const Sum* values, const Keep& keep) {
  Sum decoded[kTile];
  for (int64_t done = 0; done < count; done += kTile) {
    const int64_t n = count - done < kTile ? count - done : kTile;
    decode_range<Codec, false>(layout, row, begin + done, n, decoded);
#pragma GCC ivdep  // `keep` may write values[done + i]
    for (int64_t i = 0; i < n; ++i) keep(done + i, values[done + i] - decoded[i]);
  }
}

// All ranks have seen this NaN or Inf. If it were kept, it would come back in every later step.
template <class Sum>
HD Sum finite_or_zero(Sum x) {
  return x - x == 0 ? x : 0;
}

// Makes every NaN the same NaN: which of two NaNs a sum keeps differs between devices.
template <class Lane, class Sum>
void scale_sums(Sum* sums, int64_t count, Sum scale) {
  using Tail = typename Lane::Tail;
  int64_t i = 0;
  for (; i + Lane::width <= count; i += Lane::width)
    Lane::store(sums + i, Lane::quiet(Lane::mul(Lane::load(sums + i), scale)));
  for (; i < count; ++i) Tail::store(sums + i, Tail::quiet(Tail::mul(Tail::load(sums + i), scale)));
}

// The number of elements that are encoded at a time: whole groups, few enough for L1 where groups allow it.
template <class Codec>
int64_t tile_of(const Layout<Codec>& layout) {
  if (Codec::kStatistics == Statistics::none) return kTile;
  return layout.group > kTile ? layout.group : kTile / layout.group * layout.group;
}

int64_t elements_of_row(const Rows& rows, int64_t r) {
  const int64_t left = rows.numel - r * rows.pitch;
  return left < 0 ? 0 : left < rows.row_numel ? left : rows.row_numel;
}

// The kernels of codec.h.

void encode(const Spec& spec, Dtype source, const void* x, const Rows& rows, uint8_t* wire) {
  dispatch(spec, [&](auto codec) {
    using Codec = decltype(codec);
    const Layout<Codec> layout(spec, rows.row_numel);
    if (layout.row_bytes == 0) return;
    const auto run = [&](auto* from) {
      for (int64_t r = 0; r < rows.rows; ++r) {
        const int64_t valid = elements_of_row(rows, r);
        uint8_t* row = wire + r * layout.row_bytes;
        clear_unused(layout, valid, row);
        const Noise noise = noise_of_row(spec.key, r);
        if (valid > 0) encode_range(layout, from + r * rows.pitch, 0, valid, noise, row);
      }
    };
    using T = typename Codec::Tensor;
    if (source == spec.dtype)
      run(static_cast<const T*>(x));
    else
      run(static_cast<const Accumulate<T>*>(x));
  });
}

template <class Codec, class Source, class Sum>
void encode_rows_with_error(const Spec& spec, const Source* x, Sum* error, const Rows& rows, uint8_t* wire) {
  const Layout<Codec> layout(spec, rows.row_numel);
  const int64_t tile = tile_of(layout);
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t valid = elements_of_row(rows, r);
    uint8_t* row = wire + r * layout.row_bytes;
    clear_unused(layout, valid, row);
    const Noise noise = noise_of_row(spec.key, r);
    for (int64_t begin = 0; begin < valid; begin += tile) {
      const int64_t count = valid - begin < tile ? valid - begin : tile;
      Sum* owed = error + r * rows.pitch + begin;
      add_to_error<LaneOf<Codec>>(x + r * rows.pitch + begin, count, owed);
      encode_range(layout, owed, begin, count, noise, row);
      each_rest(layout, row, begin, count, owed,
                [&](int64_t i, Sum rest) { owed[i] = finite_or_zero(rest); });
    }
  }
}

void encode_with_error(const Spec& spec, Dtype source, const void* x, void* error, const Rows& rows,
                       uint8_t* wire) {
  if (codec::row_bytes(spec, rows.row_numel) == 0) return;
  dispatch(spec, [&](auto codec) {
    using Codec = decltype(codec);
    using T = typename Codec::Tensor;
    if constexpr (std::is_same_v<T, Accumulate<T>>) {
      const auto run = [&](auto* from) {
        encode_rows_with_error<Codec>(spec, from, static_cast<T*>(error), rows, wire);
      };
      if (source == spec.dtype) return run(static_cast<const T*>(x));
      if constexpr (std::is_same_v<T, float>) {
        if (source == Dtype::f16) return run(static_cast<const Half*>(x));
        if (source == Dtype::bf16) return run(static_cast<const Bfloat*>(x));
      }
    }
  });
}

void decode(const Spec& spec, const WireRows& wire, const Rows& rows, void* out) {
  dispatch(spec, [&](auto codec) {
    using Codec = decltype(codec);
    const Layout<Codec> layout(spec, rows.row_numel);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const int64_t valid = elements_of_row(rows, r);
      auto* to = static_cast<typename Codec::Tensor*>(out) + r * rows.pitch;
      if (valid > 0) decode_range<Codec, false>(layout, wire.row(r, layout.row_bytes), 0, valid, to);
    }
  });
}

void decode_add(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
                void* acc) {
  dispatch(spec, [&](auto codec) {
    using Codec = decltype(codec);
    using Sum = Accumulate<typename Codec::Tensor>;
    const Layout<Codec> layout(spec, row_numel);
    if (valid > 0) add_rows(layout, wire, rows, 0, valid, static_cast<Sum*>(acc));
  });
}

template <class Codec>
void reduce_encode_as(const Layout<Codec>& layout, const WireRows& wire, int64_t rows, int64_t valid,
                      double scale, const Noise& noise, uint8_t* out, void* scratch, void* error) {
  using Sum = Accumulate<typename Codec::Tensor>;
  using Lane = std::conditional_t<std::is_same_v<Sum, double>, Double, VectorLane>;
  const int64_t tile = tile_of(layout);
  Sum stack[kTile];
  void* heap = nullptr;  // only for blocks larger than a tile
  Sum* sums = stack;
  if (tile > kTile && Codec::kStatistics == Statistics::row) sums = static_cast<Sum*>(scratch);
  if (tile > kTile && Codec::kStatistics == Statistics::block)
    sums = static_cast<Sum*>(heap = malloc(tile * sizeof(Sum)));

  clear_unused(layout, valid, out);
  for (int64_t begin = 0; begin < valid; begin += tile) {
    const int64_t count = valid - begin < tile ? valid - begin : tile;
    memset(sums, 0, count * sizeof(Sum));
    add_rows(layout, wire, rows, begin, count, sums);
    scale_sums<Lane>(sums, count, static_cast<Sum>(scale));
    encode_range(layout, sums, begin, count, noise, out);
    if constexpr (std::is_same_v<Sum, typename Codec::Tensor>) {
      if (error == nullptr) continue;
      Sum* owed = static_cast<Sum*>(error) + begin;
      each_rest(layout, out, begin, count, sums, [&](int64_t i, Sum rest) {  // in double: rounded once
        owed[i] = finite_or_zero(static_cast<Sum>(owed[i] + rest * (1.0 / scale)));
      });
    }
  }
  free(heap);
}

void reduce_encode(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
                   double scale, uint8_t* out, void* scratch) {
  dispatch(spec, [&](auto codec) {
    const Layout<decltype(codec)> layout(spec, row_numel);
    const Noise noise = noise_of_row(spec.key, kReducedRow);
    if (layout.row_bytes > 0)
      reduce_encode_as(layout, wire, rows, valid, scale, noise, out, scratch, nullptr);
  });
}

void reduce_encode_with_error(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                              int64_t valid, double scale, uint8_t* out, void* scratch, void* error) {
  dispatch(spec, [&](auto codec) {
    const Layout<decltype(codec)> layout(spec, row_numel);
    const Noise noise = noise_of_row(spec.key, 0);
    if (layout.row_bytes > 0) reduce_encode_as(layout, wire, rows, valid, scale, noise, out, scratch, error);
  });
}

}  // namespace
}  // namespace gossamer::GOSSAMER_ISA
#endif

namespace gossamer::codec {
GOSSAMER_KERNEL_TABLE(GOSSAMER_ISA::encode, GOSSAMER_ISA::decode, GOSSAMER_ISA::decode_add,
                      GOSSAMER_ISA::reduce_encode, GOSSAMER_ISA::encode_with_error,
                      GOSSAMER_ISA::reduce_encode_with_error);
}  // namespace gossamer::codec
