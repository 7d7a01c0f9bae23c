// The loops that run a codec's arithmetic over device memory: the twin of cpu_driver.inl, with the same
// headers and the scalar lane. A team of threads (a warp or a whole thread block) handles one group, four
// elements a thread at a time. Included by cuda_launches.cuh only.
#pragma once

#include <cuda_runtime.h>

#include "codec/codec_list.h"
#include "codec/cuda.h"
#include "codec/cuda_pack.cuh"
#include "codec/noise.h"

namespace gossamer::device {
namespace {

constexpr int64_t kChunk = 1024;  // elements of a team's piece where the codec sets no group

template <class Codec>
using LaneOf = std::conditional_t<std::is_same_v<typename Codec::Value, double>, Double, Scalar>;
template <class Codec>
using SumOf = Accumulate<typename Codec::Tensor>;

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

// sums += elements i, i+1, ... of every row, in row order.
template <class Codec, class Wire>
__device__ void add_rows(const Layout& layout, const Wire& wire, int64_t rows, int64_t group, int64_t i,
                         int64_t left, Pack<SumOf<Codec>>& sums) {
  using Lane = LaneOf<Codec>;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = wire.row(r, layout.row_bytes);
    const auto params = Codec::read(row, group);
    const auto codes = load_codes<Codec>(row + layout.header_bytes, i, left);
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      Lane::add_to(&sums.v[k], Codec::template dequantise<Lane>(params, Lane::load(&codes.v[k])));
  }
}

// The source of what is encoded: rows of a tensor ...
template <class Codec_, class T>
struct TensorRows {
  using Codec = Codec_;
  using Element = T;
  const T* x;
  int64_t row_numel, numel;

  __device__ int64_t valid(int64_t row) const {
    const int64_t left = numel - row * row_numel;
    return left < 0 ? 0 : left < row_numel ? left : row_numel;
  }
  __device__ Pack<T> load(int64_t row, int64_t, int64_t i, int64_t left) const {
    const T* p = x + row * row_numel + i;
    return load_pack(p, left, is_aligned(p));
  }
};

// ... or the scaled sum of wire rows. It is computed again at each access, which is cheaper than storing it.
template <class Codec_, class Wire>
struct SumOfRows {
  using Codec = Codec_;
  using Element = SumOf<Codec>;
  Layout layout;
  Wire wire;
  int64_t rows, valid_numel;
  Element scale;

  __device__ int64_t valid(int64_t) const { return valid_numel; }
  __device__ Pack<Element> load(int64_t, int64_t group, int64_t i, int64_t left) const {
    using Lane = std::conditional_t<std::is_same_v<Element, double>, Double, Scalar>;
    Pack<Element> sums{};
    add_rows<Codec>(layout, wire, rows, group, i, left, sums);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums.v[k] = Lane::quiet(Lane::mul(sums.v[k], scale));
    return sums;
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

// The statistics of elements [begin, end) of a row; every thread of the team gets them.
template <int kTeam, class Source>
__device__ auto observe(const Source& source, int64_t row, int64_t group, int64_t begin, int64_t end) {
  using Codec = typename Source::Codec;
  using Stats = typename Codec::template Stats<Scalar>;
  const int rank = threadIdx.x % kTeam;
  Stats stats = Codec::template nothing<Scalar>();
#pragma unroll 4
  for (int64_t i = begin + rank * kPack; i < end; i += kTeam * kPack) {
    const auto pack = source.load(row, group, i, end - i);
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (i + k < end) stats = Codec::template observe<Scalar>(stats, value_of<Source>(pack.v[k]));
  }

  constexpr int kWords = sizeof(Stats) / sizeof(int);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    int words[kWords];
    memcpy(words, &stats, sizeof(stats));
    for (int w = 0; w < kWords; ++w) words[w] = __shfl_xor_sync(0xffffffffu, words[w], offset);
    Stats other;
    memcpy(&other, words, sizeof(other));
    stats = Codec::merge(stats, other);
  }
  if constexpr (kTeam > kWarp) {  // the team is the thread block
    __shared__ Stats of_warps[kTeam / kWarp];
    __syncthreads();  // wait for the readers of the previous group
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = stats;
    __syncthreads();
    for (int w = 0; w < kTeam / kWarp; ++w) stats = Codec::merge(stats, of_warps[w]);
  }
  return stats;
}

// The sum of elements [begin, end) of a row, in the order that layout.h defines; every thread of the warp gets it.
template <class Source>
__device__ Sum summed(const Source& source, int64_t row, int64_t group, int64_t begin, int64_t end) {
  using Codec = typename Source::Codec;
  static_assert(kPartialSums == kWarp * kPack, "a thread holds the partial sums of its pack");
  double partial[kPack] = {};
  for (int64_t i = begin + threadIdx.x % kWarp * kPack; i < end; i += kWarp * kPack) {
    const auto pack = source.load(row, group, i, end - i);
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (i + k < end)
        partial[k] += static_cast<double>(Codec::template summand<Scalar>(value_of<Source>(pack.v[k])));
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
    for (int k = 0; k < kPack; ++k) partial[k] += __shfl_xor_sync(0xffffffffu, partial[k], offset);
  static_assert(kPack == 4, "the last two halvings, within the pack");
  return {(partial[0] + partial[2]) + (partial[1] + partial[3]), end - begin};
}

template <int kTeam, class Source>
__device__ auto params_of(const Source& source, int64_t row, int64_t group, int64_t begin, int64_t end,
                          bool stochastic) {
  using Codec = typename Source::Codec;
  if constexpr (Codec::kSummed) {
    static_assert(kTeam == kWarp, "the order of summation is a warp's");
    return Codec::finish(summed(source, row, group, begin, end));
  } else if constexpr (Codec::kStochastic) {
    return Codec::finish(observe<kTeam>(source, row, group, begin, end), stochastic);
  } else {
    return Codec::finish(observe<kTeam>(source, row, group, begin, end));
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
                                            Lane::fractions(noise.first, noise.second, i));
  }
  return Codec::template quantise<Lane>(params, value_of<Source>(x));
}

// Codes of elements [begin, end) of a row, and zeros from `end` to `slots`. Where threads share bytes, slots - begin
// is a multiple of 128, so that warps stay whole.
template <int kTeam, class Source>
__device__ void quantise(const Source& source, typename Source::Codec::Params params, int64_t row,
                         int64_t group, int64_t begin, int64_t end, int64_t slots, const Noise& noise,
                         uint8_t* codes) {
  using Codec = typename Source::Codec;
  using Code = typename Codec::Code;
  using Lane = LaneOf<Codec>;
  const bool blank = Codec::is_blank(params);
#pragma unroll 2
  for (int64_t i = begin + threadIdx.x % kTeam * kPack; i < slots; i += kTeam * kPack) {
    Pack<Code> out{};
    if (i < end && !blank) {
      const auto pack = source.load(row, group, i, end - i);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (i + k >= end) continue;
        if constexpr (Codec::kRaw && std::is_same_v<typename Source::Element, Code>)
          out.v[k] = pack.v[k];
        else
          Lane::store(&out.v[k], quantised<Source>(params, pack.v[k], noise, i + k));
      }
    }
    store_codes<Codec>(codes, i, out, slots - i);
  }
}

// One team's piece of a row, and the code slots that the team writes. The last piece writes the padding too.
struct Piece {
  int64_t row, index, begin, end, slots;
};
template <class Source>
__device__ Piece piece_of(const Source& source, const Layout& layout, int64_t item, int64_t pieces,
                          int64_t piece_numel) {
  const int64_t row = item / pieces, index = item % pieces, begin = index * piece_numel;
  const int64_t valid = source.valid(row), after = begin + piece_numel;
  const int64_t all_slots = (layout.row_bytes - layout.header_bytes) * 8 / Source::Codec::kCodeBits;
  return {row, index, begin, after < valid ? after : valid, index + 1 == pieces ? all_slots : after};
}

__device__ void clear_header_padding(const Layout& layout, int64_t entry_bytes, int rank, int team,
                                     uint8_t* row) {
  for (int64_t i = layout.groups * entry_bytes + rank; i < layout.header_bytes; i += team) row[i] = 0;
}

// Encodes one group: statistics, header, codes. Row r draws the random numbers of row first_row + r.
template <int kTeam, class Source>
__global__ void encode_groups(Source source, Layout layout, int64_t items, uint64_t key, int64_t first_row,
                              uint8_t* wire) {
  using Codec = typename Source::Codec;
  const int rank = threadIdx.x % kTeam;
  const int64_t teams = blockDim.x / kTeam;
  for (int64_t item = blockIdx.x * teams + threadIdx.x / kTeam; item < items; item += gridDim.x * teams) {
    const Piece piece = piece_of(source, layout, item, layout.groups, layout.group);
    uint8_t* row = wire + piece.row * layout.row_bytes;
    typename Codec::Params params{};
    if constexpr (Codec::kStatistics != Statistics::none) {
      if (piece.begin < piece.end)
        params = params_of<kTeam>(source, piece.row, piece.index, piece.begin, piece.end, key != 0);
      if (rank == 0) Codec::write(params, row, piece.index);
      if (piece.index == 0) clear_header_padding(layout, Codec::kEntryBytes, rank, kTeam, row);
    }
    Noise noise{};
    if constexpr (Codec::kStochastic) noise = noise_of_row(key, first_row + piece.row);
    quantise<kTeam>(source, params, piece.row, piece.index, piece.begin, piece.end, piece.slots, noise,
                    row + layout.header_bytes);
  }
}

// The same where statistics span a long row, in three launches. The first leaves `parts` partial statistics of each row
// where the row's codes will be; the second writes the header; the third writes the codes.
template <int kTeam, class Source>
__global__ void observe_parts(Source source, Layout layout, int64_t part_numel, uint8_t* wire) {
  using Stats = typename Source::Codec::template Stats<Scalar>;
  const int64_t row = blockIdx.y, begin = blockIdx.x * part_numel, valid = source.valid(row);
  const int64_t end = begin + part_numel < valid ? begin + part_numel : valid;
  const Stats stats = observe<kTeam>(source, row, 0, begin, end);
  if (threadIdx.x == 0)
    reinterpret_cast<Stats*>(wire + row * layout.row_bytes + layout.header_bytes)[blockIdx.x] = stats;
}

template <class Source>
__global__ void write_headers(Source source, Layout layout, int64_t parts, uint8_t* wire) {
  using Codec = typename Source::Codec;
  using Stats = typename Codec::template Stats<Scalar>;
  uint8_t* row = wire + blockIdx.x * layout.row_bytes;
  if (threadIdx.x == 0) {
    const Stats* partial = reinterpret_cast<const Stats*>(row + layout.header_bytes);
    Stats stats = Codec::template nothing<Scalar>();
    for (int64_t p = 0; p < parts; ++p) stats = Codec::merge(stats, partial[p]);
    const bool empty = source.valid(blockIdx.x) == 0;
    Codec::write(empty ? typename Codec::Params{} : Codec::finish(stats), row, 0);
  }
  clear_header_padding(layout, Codec::kEntryBytes, threadIdx.x, kWarp, row);
}

template <class Source>
__global__ void quantise_chunks(Source source, Layout layout, int64_t chunks, int64_t items, uint8_t* wire) {
  using Codec = typename Source::Codec;
  const int64_t teams = blockDim.x / kWarp;
  for (int64_t item = blockIdx.x * teams + threadIdx.x / kWarp; item < items; item += gridDim.x * teams) {
    const Piece piece = piece_of(source, layout, item, chunks, kChunk);
    uint8_t* row = wire + piece.row * layout.row_bytes;
    quantise<kWarp>(source, Codec::read(row, 0), piece.row, 0, piece.begin, piece.end, piece.slots, Noise{},
                    row + layout.header_bytes);
  }
}

// A chunk never straddles two groups.
template <class Codec, class Wire>
__global__ void decode_chunks(Layout layout, int64_t chunk, int64_t chunks, int64_t items, Wire wire,
                              int64_t numel, typename Codec::Tensor* out) {
  using T = typename Codec::Tensor;
  using Lane = LaneOf<Codec>;
  const TensorRows<Codec, T> to{out, layout.row_numel, numel};
  const int64_t teams = blockDim.x / kWarp;
  for (int64_t item = blockIdx.x * teams + threadIdx.x / kWarp; item < items; item += gridDim.x * teams) {
    const Piece piece = piece_of(to, layout, item, chunks, chunk);
    if (piece.begin >= piece.end) continue;
    const uint8_t* row = wire.row(piece.row, layout.row_bytes);
    const auto params = Codec::read(row, piece.begin / layout.group);
    for (int64_t i = piece.begin + threadIdx.x % kWarp * kPack; i < piece.end; i += kWarp * kPack) {
      const auto codes = load_codes<Codec>(row + layout.header_bytes, i, piece.end - i);
      Pack<T> x;
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if constexpr (Codec::kRaw)
          x.v[k] = codes.v[k];
        else
          Lane::store(&x.v[k], Codec::template dequantise<Lane>(params, Lane::load(&codes.v[k])));
      }
      T* p = out + piece.row * layout.row_numel + i;
      store_pack(p, x, piece.end - i, is_aligned(p));
    }
  }
}

template <class Codec, class Wire>
__global__ void decode_add_chunks(Layout layout, int64_t chunk, int64_t chunks, Wire wire, int64_t rows,
                                  int64_t valid, SumOf<Codec>* acc) {
  const int64_t teams = blockDim.x / kWarp;
  for (int64_t c = blockIdx.x * teams + threadIdx.x / kWarp; c < chunks; c += gridDim.x * teams) {
    const int64_t begin = c * chunk, end = begin + chunk < valid ? begin + chunk : valid;
    const int64_t group = begin / layout.group;
    for (int64_t i = begin + threadIdx.x % kWarp * kPack; i < end; i += kWarp * kPack) {
      auto sums = load_pack(acc + i, end - i, is_aligned(acc + i));
      add_rows<Codec>(layout, wire, rows, group, i, end - i, sums);
      store_pack(acc + i, sums, end - i, is_aligned(acc + i));
    }
  }
}

}  // namespace
}  // namespace gossamer::device
