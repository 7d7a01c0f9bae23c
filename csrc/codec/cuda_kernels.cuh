// The loops that run a codec's arithmetic over device memory: the twin of cpu_driver.inl, with the same
// headers and the scalar lane. A team of threads handles one group, a pack a thread at a time. Included by
// cuda_launches.cuh only.
#pragma once

#include <cuda_runtime.h>

#include "codec/codec_list.h"
#include "codec/cuda.h"
#include "codec/cuda_pack.cuh"
#include "codec/noise.h"

namespace gossamer::device {
namespace {

constexpr int64_t kChunk = 1024;  // elements that a warp decodes at a time
// Threads that must fit on a multiprocessor, so that each may have 128 registers. Without this number ptxas would spill a
// few registers where that makes room for another block.
constexpr int kFewestThreads = 512;

template <class T>
using WideLane = std::conditional_t<std::is_same_v<T, double>, Double, Scalar>;
template <class Codec>
using LaneOf = WideLane<typename Codec::Value>;
template <class Codec>
using SumOf = Accumulate<typename Codec::Tensor>;

// The threads that handle one group: neighbours within a warp, 2 to the power of `bits` ...
struct Lanes {
  static constexpr int kThreads = 256;  // of the thread block
  HD explicit Lanes(int bits) : bits(bits), size(1 << bits) {}
  int bits, size;
  __device__ int rank() const { return threadIdx.x & (size - 1); }
  __device__ unsigned mask() const {
    return size == kWarp ? 0xffffffffu : ((1u << size) - 1) << (threadIdx.x % kWarp & -size);
  }
};

// ... or a whole thread block.
struct Block {
  static constexpr int bits = 9, size = 1 << bits, kThreads = size;
  __device__ int rank() const { return threadIdx.x; }
  __device__ unsigned mask() const { return 0xffffffffu; }
};

// body(i) for each pack of four of the calling thread, which begins at element i of [begin, end).
template <class Team, class Body>
__device__ void each_pack(Team team, int64_t begin, int64_t end, Body body) {
  for (int64_t i = begin + team.rank() * kPack; i < end; i += team.size * kPack) body(i);
}

// Where the parts of a wire row lie; computed on the host.
struct Layout {
  int64_t row_numel, group, groups, header_bytes, row_bytes;
};

// Wire rows to read: contiguous, or each at its own address. Arguments of a kernel.
struct InARow {
  const uint8_t* first;
  __device__ const uint8_t* row(int64_t r, int64_t row_bytes) const { return first + r * row_bytes; }
};
struct Apart {
  const uint8_t* each[codec::cuda::kMaxEach];
  __device__ const uint8_t* row(int64_t r, int64_t) const { return each[r]; }
};

// The elements of a pack of doubles: as few as have a byte of codes, since registers are few.
template <class Codec>
constexpr int kDoublePack = Codec::kCodeBits < 2 ? 8 : kPack;

// The elements of a pack where a tensor's values are encoded: many in blocks, so that a thread has 64 bytes of loads in flight,
// and few threads share a block and its division.
template <class Codec, class Element>
constexpr int kTensorPack = std::is_same_v<Element, double>           ? kDoublePack<Codec>
                            : Codec::kStatistics == Statistics::block ? 16
                                                                      : kPack;

// The elements of a pack where rows are summed: as many as have 16 bytes of codes, and 16 of fewer than 4 bits, since 32 do
// not fit into the registers of each architecture.
template <class Codec>
constexpr int kRowPack = std::is_same_v<SumOf<Codec>, double> ? kDoublePack<Codec>
                         : Codec::kCodeBits < 4               ? 16
                                                              : 128 / Codec::kCodeBits;

constexpr int kRowsAtOnce = 4;  // rows whose loads a thread has in flight

// sums += elements i, i+1, ... of every row, in row order.
template <class Codec, int N, class Wire>
__device__ void add_rows(const Layout& layout, const Wire& wire, int64_t rows, int64_t group, int64_t i,
                         int64_t left, Pack<SumOf<Codec>, N>& sums) {
  using Lane = LaneOf<Codec>;
  using Bits = decltype(load_bits<Codec, N>(nullptr, 0, 0));
  for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
    typename Codec::Params params[kRowsAtOnce] = {};
    Bits bits[kRowsAtOnce] = {};
#pragma unroll
    for (int q = 0; q < kRowsAtOnce; ++q) {
      if (r + q >= rows) continue;
      const uint8_t* row = wire.row(r + q, layout.row_bytes);
      params[q] = Codec::read(row, group);
      bits[q] = load_bits<Codec, N>(row + layout.header_bytes, i, left);
    }
#pragma unroll
    for (int q = 0; q < kRowsAtOnce; ++q) {
      if (r + q >= rows) continue;
      if constexpr (Codec::kCodeBits < 8) {
        constexpr int kInWord = 32 / Codec::kCodeBits;
        const auto words = bit_cast<Pack<unsigned, sizeof(Bits) / 4>>(bits[q]);
#pragma unroll
        for (int k = 0; k < N; ++k)
          Lane::add_to(&sums.v[k], Codec::addend(params[q], words.v[k / kInWord], k % kInWord));
      } else {
        const auto codes = codes_of<Codec, N>(bits[q]);
#pragma unroll
        for (int k = 0; k < N; ++k)
          Lane::add_to(&sums.v[k], Codec::template dequantise<Lane>(params[q], Lane::load(&codes.v[k])));
      }
    }
  }
}

// How many of a pack's elements there are, if `left` are left.
template <int N>
__device__ int within(int64_t left) {
  return left < N ? static_cast<int>(left) : N;
}

__device__ int64_t elements_of_row(const codec::Rows& rows, int64_t r) {
  const int64_t left = rows.numel - r * rows.pitch;
  return left < 0 ? 0 : left < rows.row_numel ? left : rows.row_numel;
}

// All ranks have seen this NaN or Inf. If it were kept, it would come back in every later step.
template <class Sum>
__device__ Sum finite_or_zero(Sum x) {
  return x - x == 0 ? x : 0;
}

// A source is what is encoded. It loads values. If it keeps an error, it takes what each code left out of its value.

// Rows of a tensor ...
template <class Codec_, class T>
struct TensorRows {
  using Codec = Codec_;
  using Element = T;
  static constexpr bool kKeepsError = false, kSumsRows = false;
  static constexpr int kWidth = kTensorPack<Codec, T>;
  const T* x;
  codec::Rows rows;

  __device__ int64_t valid(int64_t row) const { return elements_of_row(rows, row); }
  __device__ Pack<T, kWidth> load(int64_t row, int64_t, int64_t i, int64_t left) const {
    const T* p = x + row * rows.pitch + i;
    return load_pack<kWidth>(p, left, is_aligned<kWidth>(p));
  }
};

// ... or such rows plus the error of the last call ...
template <class Tensor>
struct PlusError : Tensor {
  using Element = typename Tensor::Codec::Tensor;
  static constexpr bool kKeepsError = true;
  static constexpr int kWidth = Tensor::kWidth;
  Element* error;

  __device__ Pack<Element, kWidth> load(int64_t row, int64_t group, int64_t i, int64_t left) const {
    const Element* owed = error + row * this->rows.pitch + i;
    const auto values = Tensor::load(row, group, i, left);
    auto sums = load_pack<kWidth>(owed, left, is_aligned<kWidth>(owed));
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      WideLane<Element>::add_to(&sums.v[k], WideLane<Element>::load(&values.v[k]));
    return sums;
  }
  __device__ void keep(int64_t row, int64_t i, int64_t left, const Pack<Element, kWidth>& rests) const {
    Element* owed = error + row * this->rows.pitch + i;
    Pack<Element, kWidth> kept;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) kept.v[k] = finite_or_zero(rests.v[k]);
    store_pack(owed, kept, left, is_aligned<kWidth>(owed));
  }
};

// ... or the scaled sum of wire rows ...
template <class Codec_, class Wire>
struct SumOfRows {
  using Codec = Codec_;
  using Element = SumOf<Codec>;
  static constexpr bool kKeepsError = false, kSumsRows = true;
  static constexpr int kWidth = kRowPack<Codec>;
  Layout layout;
  Wire wire;
  int64_t rows, valid_numel;
  Element scale;

  __device__ int64_t valid(int64_t) const { return valid_numel; }
  __device__ Pack<Element, kWidth> load(int64_t, int64_t group, int64_t i, int64_t left) const {
    using Lane = WideLane<Element>;
    Pack<Element, kWidth> sums{};
    add_rows<Codec>(layout, wire, rows, group, i, left, sums);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums.v[k] = Lane::quiet(Lane::mul(sums.v[k], scale));
    return sums;
  }
};

// ... where this rank's error takes over what its encoding leaves out.
template <class Sum>
struct SumWithError : Sum {
  using Element = typename Sum::Element;
  static constexpr bool kKeepsError = true;
  Element* error;
  double unscaled;  // 1 / scale

  __device__ void keep(int64_t, int64_t i, int64_t left, const Pack<Element, Sum::kWidth>& rests) const {
    Element* owed = error + i;
    auto kept = load_pack<Sum::kWidth>(owed, left, is_aligned<Sum::kWidth>(owed));
#pragma unroll
    for (int k = 0; k < Sum::kWidth; ++k)  // in double: rounded once
      kept.v[k] = finite_or_zero(static_cast<Element>(kept.v[k] + rests.v[k] * unscaled));
    store_pack(owed, kept, left, is_aligned<Sum::kWidth>(owed));
  }
};

template <class Source>
__device__ auto value_of(const typename Source::Element& x) {
  using Codec = typename Source::Codec;
  using Lane = LaneOf<Codec>;
  const auto value = Lane::load(&x);
  if constexpr (Codec::kRoundsFirst && !std::is_same_v<typename Source::Element, typename Codec::Tensor>)
    return Lane::rounded(value, typename Codec::Tensor{});
  else
    return value;
}

// One team's piece of a row, and the code slots that the team writes. The last piece writes the padding too.
struct Piece {
  int64_t row, group, begin, end, slots;
};
template <class Source>
__device__ Piece piece_of(const Source& source, const Layout& layout, int64_t row, int64_t index,
                          int64_t pieces, int64_t piece_numel) {
  const int64_t begin = index * piece_numel, after = begin + piece_numel, valid = source.valid(row);
  const int64_t all_slots = (layout.row_bytes - layout.header_bytes) * 8 / Source::Codec::kCodeBits;
  const int64_t group = Source::Codec::kStatistics == Statistics::row ? 0 : index;
  return {row, group, begin, after < valid ? after : valid, index + 1 == pieces ? all_slots : after};
}

// How many elements a thread keeps in registers. A longer group goes to a thread block, as all of it is kept where rows are
// summed. Longer rows with one set of statistics go to several.
template <class Element>
constexpr int kHeld = 64 / static_cast<int>(sizeof(Element));
template <class Source>
constexpr int64_t kMaxWarpGroup = Source::kSumsRows ? kWarp * kHeld<typename Source::Element> : 1024;
template <class Element>
constexpr int64_t kMaxTeamRow = Block::size * kHeld<Element>;

// The values of a piece. Each thread keeps the first packs, so that they are read once. Others are loaded again: from cache,
// where they are of a tensor.
template <class Team, class Source>
class Values {
 public:
  static constexpr int kWidth = Source::kWidth;
  using Held = Pack<typename Source::Element, kWidth>;

  __device__ Values(Team team, const Source& source, const Piece& piece)
      : source_(source),
        piece_(piece),
        first_(piece.begin + team.rank() * kWidth),
        step_(team.size * kWidth) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      if (first_ + k * step_ < piece.end) held_[k] = load(first_ + k * step_);
  }
  // body(i, get) for each pack of the calling thread, which begins at element i of [piece.begin, end). get() returns its
  // values; not beyond piece.end.
  template <class Body>
  __device__ void each(int64_t end, Body body) const {
    int64_t i = first_;
#pragma unroll
    for (int k = 0; k < kPacks; ++k, i += step_)
      if (i < end) body(i, [&] { return held_[k]; });
    if constexpr (!kHoldsAll)
      for (; i < end; i += step_) body(i, [&] { return load(i); });
  }

 private:
  using Codec = typename Source::Codec;
  // Without statistics each value is used once. A tensor's row with one set of them is too long to be kept.
  static constexpr bool kHolds =
      Codec::kStatistics == Statistics::block || (Source::kSumsRows && Codec::kStatistics == Statistics::row);
  static constexpr int kMost = kHeld<typename Source::Element>;
  static constexpr int kPacks = !kHolds ? 0 : kMost > kWidth ? kMost / kWidth : 1;
  static constexpr bool kHoldsAll =
      kHolds && Source::kSumsRows &&
      (Codec::kStatistics == Statistics::row || (std::is_same_v<Team, Lanes> && !Codec::kSummed));

  __device__ Held load(int64_t i) const { return source_.load(piece_.row, piece_.group, i, piece_.end - i); }

  const Source& source_;
  const Piece& piece_;
  const int64_t first_, step_;
  Held held_[kPacks > 0 ? kPacks : 1] = {};
};

// ... or the sums that observe_parts has left in `sums`.
template <class Source>
struct Stored : Source {
  using Element = typename Source::Element;
  static constexpr bool kSumsRows = false;
  const Element* sums;

  __device__ auto load(int64_t, int64_t, int64_t i, int64_t left) const {
    return load_pack<Source::kWidth>(sums + i, left, is_aligned<Source::kWidth>(sums + i));
  }
};

// The statistics of what all threads of the team have observed; every thread gets them.
template <class Codec, class Team, class Stats>
__device__ Stats merged(Team team, Stats stats) {
  constexpr int kWords = sizeof(Stats) / sizeof(int);
  for (int offset = (team.size < kWarp ? team.size : kWarp) / 2; offset > 0; offset /= 2) {
    int words[kWords];
    memcpy(words, &stats, sizeof(stats));
    for (int w = 0; w < kWords; ++w) words[w] = __shfl_xor_sync(team.mask(), words[w], offset);
    Stats other;
    memcpy(&other, words, sizeof(other));
    stats = Codec::merge(stats, other);
  }
  if constexpr (std::is_same_v<Team, Block>) {
    constexpr int kWarps = Block::size / kWarp;
    __shared__ Stats of_warps[kWarps];
    __syncthreads();  // wait for the readers of the previous group
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = stats;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) stats = Codec::merge(stats, of_warps[w]);
  }
  return stats;
}

template <class Team, class Source>
__device__ auto observe(Team team, const Values<Team, Source>& values, const Piece& piece) {
  using Codec = typename Source::Codec;
  auto stats = Codec::template nothing<Scalar>();
  values.each(piece.end, [&](int64_t i, auto get) {
    const auto pack = get();
    const int valid = within<Source::kWidth>(piece.end - i);
#pragma unroll
    for (int k = 0; k < Source::kWidth; ++k)
      if (k < valid) stats = Codec::template observe<Scalar>(stats, value_of<Source>(pack.v[k]));
  });
  return merged<Codec>(team, stats);
}

constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }

// The sum of a piece, in the order that layout.h defines; every thread of the team gets it. Lane l holds the partial sums of
// its pack. In the first halvings two lanes share the additions, as long as they hold several sums each: one takes those of
// even number of both, the other the odd ones.
template <class Team, class Source>
__device__ Sum summed(Team team, const Values<Team, Source>& values, const Piece& piece) {
  using Codec = typename Source::Codec;
  constexpr int kWidth = Source::kWidth, kLanes = kPartialSums / kWidth;
  constexpr int kBits = log2_of(kWidth), kStages = log2_of(kLanes),
                kShared = kBits < kStages ? kBits : kStages;
  double sums[kWidth] = {};
  values.each(piece.end, [&](int64_t i, auto get) {
    const auto pack = get();
    const int valid = within<kWidth>(piece.end - i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (k < valid)
        sums[k] += static_cast<double>(Codec::template summand<Scalar>(value_of<Source>(pack.v[k])));
  });
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    const int offset = kLanes / 2 >> stage;
    if (stage < kShared) {
      const bool odd = threadIdx.x & offset;
#pragma unroll
      for (int k = 0; k < kWidth / 2; ++k) {
        if (k >= kWidth >> (stage + 1)) continue;
        const double kept = odd ? sums[2 * k + 1] : sums[2 * k], given = odd ? sums[2 * k] : sums[2 * k + 1];
        sums[k] = kept + __shfl_xor_sync(team.mask(), given, offset);
      }
    } else {
      sums[0] += __shfl_xor_sync(team.mask(), sums[0], offset);
    }
  }
  // A lane now holds the sums whose numbers in a pack have the low bits that it has taken.
#pragma unroll
  for (int bit = kBits - kShared - 1; bit >= 0; --bit)
#pragma unroll
    for (int k = 0; k < kWidth / 2; ++k)
      if (k < 1 << bit) sums[k] += sums[k + (1 << bit)];
#pragma unroll
  for (int stage = kShared - 1; stage >= 0; --stage)
    sums[0] += __shfl_xor_sync(team.mask(), sums[0], kLanes / 2 >> stage);
  return {sums[0], piece.end - piece.begin};
}

template <class Team, class Source>
__device__ auto params_of(Team team, const Values<Team, Source>& values, const Piece& piece,
                          bool stochastic) {
  using Codec = typename Source::Codec;
  if constexpr (Codec::kSummed)
    return Codec::finish(summed(team, values, piece));
  else if constexpr (Codec::kStochastic)
    return Codec::finish(observe(team, values, piece), stochastic);
  else
    return Codec::finish(observe(team, values, piece));
}

// The parameters that a reader of the wire gets.
template <class Codec>
__device__ typename Codec::Params as_read(const typename Codec::Params& params) {
  if constexpr (Codec::kStatistics == Statistics::none) {
    return params;
  } else {
    alignas(16) uint8_t entry[Codec::kEntryBytes];
    Codec::write(params, entry, 0);
    return Codec::read(entry, 0);
  }
}

template <class Source>
__device__ auto quantised(const typename Source::Codec::Params& params, const typename Source::Element& x,
                          const Noise& noise, int64_t i) {
  using Codec = typename Source::Codec;
  using Lane = LaneOf<Codec>;
  if constexpr (Codec::kStochastic) {
    if (noise.on)
      return Codec::template quantise<Lane>(params, value_of<Source>(x),
                                            Lane::drawn(noise.first, noise.second, i));
  }
  return Codec::template quantise<Lane>(params, value_of<Source>(x));
}

template <class Codec>
__device__ typename Codec::Tensor dequantised(const typename Codec::Params& params,
                                              const typename Codec::Code& code) {
  if constexpr (Codec::kRaw) {
    return code;
  } else {
    using Lane = LaneOf<Codec>;
    typename Codec::Tensor x;
    Lane::store(&x, Codec::template dequantise<Lane>(params, Lane::load(&code)));
    return x;
  }
}

// Codes of a piece, and zeros from its end to its last slot.
template <class Team, class Source>
__device__ void quantise(const Source& source, const Values<Team, Source>& values,
                         typename Source::Codec::Params params, const Piece& piece, const Noise& noise,
                         uint8_t* codes) {
  constexpr int kWidth = Source::kWidth;
  using Codec = typename Source::Codec;
  using Code = typename Codec::Code;
  using Element = typename Source::Element;
  const bool blank = Codec::is_blank(params);
  const auto read = as_read<Codec>(params);
  values.each(piece.slots, [&](int64_t i, auto get) {
    Pack<Code, kWidth> out{};
    if (i < piece.end && (Source::kKeepsError || !blank)) {
      const auto pack = get();
      const int valid = blank ? 0 : within<kWidth>(piece.end - i);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k >= valid) continue;
        if constexpr (Codec::kRaw && std::is_same_v<Element, Code>)
          out.v[k] = pack.v[k];
        else
          LaneOf<Codec>::store(&out.v[k], quantised<Source>(params, pack.v[k], noise, i + k));
      }
      if constexpr (Source::kKeepsError) {
        Pack<Element, kWidth> rests;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) rests.v[k] = pack.v[k] - dequantised<Codec>(read, out.v[k]);
        source.keep(piece.row, i, piece.end - i, rests);
      }
    }
    store_codes<Codec, kWidth>(codes, i, out, piece.slots - i);
  });
}

__device__ void clear_header_padding(const Layout& layout, int64_t entry_bytes, int rank, int team,
                                     uint8_t* row) {
  for (int64_t i = layout.groups * entry_bytes + rank; i < layout.header_bytes; i += team) row[i] = 0;
}

// body(row, index) for each of `pieces` pieces of each row that the calling team of the thread block takes.
template <class Body>
__device__ void each_piece(int64_t rows, int64_t pieces, int team_bits, Body body) {
  const int64_t teams = blockDim.x >> team_bits;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    for (int64_t index = blockIdx.x * teams + (threadIdx.x >> team_bits); index < pieces;
         index += gridDim.x * teams)
      body(row, index);
}

// Encodes groups: statistics, header, codes. Row r draws the random numbers of row first_row + r.
template <class Team, class Source>
__global__ void __launch_bounds__(Team::kThreads, kFewestThreads / Team::kThreads)
    encode_groups(Team team, Source source, Layout layout, int64_t rows, uint64_t key, int64_t first_row,
                  uint8_t* wire) {
  using Codec = typename Source::Codec;
  each_piece(rows, layout.groups, team.bits, [&](int64_t r, int64_t index) {
    const Piece piece = piece_of(source, layout, r, index, layout.groups, layout.group);
    const Values values(team, source, piece);
    uint8_t* row = wire + r * layout.row_bytes;
    typename Codec::Params params{};
    if constexpr (Codec::kStatistics != Statistics::none) {
      if (piece.begin < piece.end) params = params_of(team, values, piece, key != 0);
      if (team.rank() == 0) Codec::write(params, row, index);
      if (index == 0) clear_header_padding(layout, Codec::kEntryBytes, team.rank(), team.size, row);
    }
    Noise noise{};
    if constexpr (Codec::kStochastic) noise = noise_of_row(key, first_row + r);
    quantise(source, values, params, piece, noise, row + layout.header_bytes);
  });
}

// The same where statistics span a long row, in three launches. The first leaves partial statistics of each row where the
// row's codes will be, one for each part; the second writes the header; the third writes the codes. If `sums` is not null,
// the first leaves the row's values there for the third, which reads them as Stored.
template <class Source>
__global__ void __launch_bounds__(Block::kThreads, 1)
    observe_parts(Source source, Layout layout, int64_t part_numel, uint8_t* wire,
                  typename Source::Element* sums) {
  using Stats = typename Source::Codec::template Stats<Scalar>;
  const int64_t r = blockIdx.y;
  const Piece piece = piece_of(source, layout, r, blockIdx.x, gridDim.x, part_numel);
  const Values values(Block{}, source, piece);
  const Stats stats = observe(Block{}, values, piece);
  if (sums != nullptr)
    values.each(piece.end, [&](int64_t i, auto get) {
      store_pack(sums + i, get(), piece.end - i, is_aligned<Source::kWidth>(sums + i));
    });
  if (threadIdx.x == 0)
    reinterpret_cast<Stats*>(wire + r * layout.row_bytes + layout.header_bytes)[blockIdx.x] = stats;
}

template <class Source>
__global__ void write_headers(Source source, Layout layout, int64_t parts, uint8_t* wire) {
  using Codec = typename Source::Codec;
  using Stats = typename Codec::template Stats<Scalar>;
  uint8_t* row = wire + blockIdx.x * layout.row_bytes;
  const Stats* partial = reinterpret_cast<const Stats*>(row + layout.header_bytes);
  Stats stats = Codec::template nothing<Scalar>();
  for (int64_t p = threadIdx.x; p < parts; p += kWarp) stats = Codec::merge(stats, partial[p]);
  stats = merged<Codec>(Lanes{kWarpBits}, stats);
  const bool empty = source.valid(blockIdx.x) == 0;
  if (threadIdx.x == 0) Codec::write(empty ? typename Codec::Params{} : Codec::finish(stats), row, 0);
  clear_header_padding(layout, Codec::kEntryBytes, threadIdx.x, kWarp, row);
}

template <class Source>
__global__ void quantise_chunks(Source source, Layout layout, int64_t rows, int64_t chunks, uint8_t* wire) {
  using Codec = typename Source::Codec;
  const Lanes team{kWarpBits};
  each_piece(rows, chunks, kWarpBits, [&](int64_t r, int64_t index) {
    const Piece piece = piece_of(source, layout, r, index, chunks, kChunk);
    const Values values(team, source, piece);
    uint8_t* row = wire + r * layout.row_bytes;
    quantise(source, values, Codec::read(row, 0), piece, Noise{}, row + layout.header_bytes);
  });
}

// The group of each pack of a chunk. A pack never straddles two groups.
template <class Codec>
class Groups {
 public:
  __device__ Groups(const Layout& layout, int64_t begin) : begin_(begin) {
    if constexpr (Codec::kStatistics == Statistics::block) {
      first_ = begin / layout.group;
      const int64_t left = (first_ + 1) * layout.group - begin;
      left_ = static_cast<unsigned>(left < kChunk ? left : kChunk);
      numel_ = static_cast<unsigned>(layout.group < kChunk ? layout.group : kChunk);
    }
  }
  __device__ int64_t of(int64_t i) const {
    const auto place = static_cast<unsigned>(i - begin_);
    return place < left_ ? first_ : first_ + 1 + (place - left_) / numel_;
  }

 private:
  int64_t begin_, first_ = 0;
  unsigned left_ = kChunk, numel_ = kChunk;  // elements of the chunk's first group, and of each other one
};

template <class Codec, class Wire>
__global__ void decode_chunks(Layout layout, codec::Rows rows, int64_t chunks, Wire wire,
                              typename Codec::Tensor* out) {
  using T = typename Codec::Tensor;
  each_piece(rows.rows, chunks, kWarpBits, [&](int64_t r, int64_t index) {
    const int64_t begin = index * kChunk, valid = elements_of_row(rows, r);
    const int64_t end = begin + kChunk < valid ? begin + kChunk : valid;
    const Groups<Codec> groups(layout, begin);
    const uint8_t* row = wire.row(r, layout.row_bytes);
    each_pack(Lanes{kWarpBits}, begin, end, [&](int64_t i) {
      const auto params = Codec::read(row, groups.of(i));
      const auto codes =
          codes_of<Codec, kPack>(load_bits<Codec, kPack>(row + layout.header_bytes, i, end - i));
      Pack<T> x;
#pragma unroll
      for (int k = 0; k < kPack; ++k) x.v[k] = dequantised<Codec>(params, codes.v[k]);
      T* p = out + r * rows.pitch + i;
      store_pack(p, x, end - i, is_aligned<kPack>(p));
    });
  });
}

template <class Codec, class Wire>
__global__ void decode_add_chunks(Layout layout, int64_t chunks, Wire wire, int64_t rows, int64_t valid,
                                  SumOf<Codec>* acc) {
  each_piece(1, chunks, kWarpBits, [&](int64_t, int64_t index) {
    const int64_t begin = index * kChunk, end = begin + kChunk < valid ? begin + kChunk : valid;
    const Groups<Codec> groups(layout, begin);
    each_pack(Lanes{kWarpBits}, begin, end, [&](int64_t i) {
      auto sums = load_pack(acc + i, end - i, is_aligned<kPack>(acc + i));
      add_rows<Codec>(layout, wire, rows, groups.of(i), i, end - i, sums);
      store_pack(acc + i, sums, end - i, is_aligned<kPack>(acc + i));
    });
  });
}

}  // namespace
}  // namespace gossamer::device
