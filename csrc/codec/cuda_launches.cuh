// The launches of cuda_launches.h: they choose the kernel and the grid for each call. The kernels are in
// cuda_kernels.cuh. Included once by each cuda_<dtype>.cu. Never synchronises. Flags: --fmad=false (contraction would
// change bytes), no --use_fast_math.
#pragma once

#include <algorithm>

#include "base/cuda_launch.cuh"
#include "codec/cuda_kernels.cuh"
#include "codec/cuda_launches.h"

namespace gossamer::codec::cuda {
namespace {

using namespace gossamer::device;

constexpr int kThreads = Lanes::kThreads;
constexpr int64_t kMaxGrid = GOSSAMER_MAX_GRID;
constexpr int64_t kMaxRowsOfGrid = 65535;

// body(Codec<T>{}) for the codec that `spec` names.
template <class T, class Body>
void dispatch(const Spec& spec, Body body) {
#define GOSSAMER_CASE_KIND(number, name, Codec) \
  case Kind::name: return body(Codec<T>{});
  switch (spec.kind) { GOSSAMER_CODECS(GOSSAMER_CASE_KIND) }
#undef GOSSAMER_CASE_KIND
}

template <class Codec>
Layout layout_of(const Spec& spec, int64_t row_numel) {
  const int64_t bytes = row_bytes(spec, row_numel);
  int64_t group = group_numel<Codec>(row_numel, spec.block);
  if (Codec::kStatistics == Statistics::none) group = kChunk;
  return {row_numel, group, bytes == 0 ? 0 : ceil_div(row_numel, group),
          Codec::header_bytes(row_numel, spec.block), bytes};
}

// Thread blocks of `teams` teams each for the pieces of each row.
dim3 grid_of(int64_t rows, int64_t pieces, int64_t teams) {
  const int64_t y = std::min(rows, kMaxGrid);
  const int64_t x = std::min(ceil_div(pieces, teams), std::max<int64_t>(kMaxGrid / y, 1));
  return {static_cast<unsigned>(x), static_cast<unsigned>(y)};
}

// The fewest lanes that hold a group in one pack of `width` elements each, but as many elements at least as a short row is
// padded to: those of 16 bytes, which are 32 of Int4, 64 of Int2 and 128 of OneBit. The lanes of a sum must have 128.
template <class Codec>
Lanes lanes_of(int64_t group, int width) {
  const int64_t numel =
      std::max<int64_t>(Codec::kCodeBits < 4 ? 128 / Codec::kCodeBits : 32, Codec::kSummed ? 0 : group);
  int bits = 0;
  while (bits < kWarpBits && (width << bits) < numel) ++bits;
  return Lanes(bits);
}

void check_wire(const char* where, const void* wire) {
  GOSSAMER_CHECK(reinterpret_cast<uintptr_t>(wire) % 16 == 0, ErrorKind::codec, where,
                 ": wire memory must be 16-byte aligned, got ", wire);
}

// body(the rows as a kernel's argument).
template <class Body>
void with_rows(const char* where, const WireRows& wire, int64_t rows, Body body) {
  if (wire.each == nullptr) {
    check_wire(where, wire.first);
    return body(InARow{wire.first});
  }
  GOSSAMER_CHECK(rows <= kMaxEach, ErrorKind::config, where, ": at most ", kMaxEach,
                 " rows may lie apart from each other, got ", rows);
  Apart apart{};
  for (int64_t r = 0; r < rows; ++r) check_wire(where, apart.each[r] = wire.each[r]);
  body(apart);
}

// `sums` takes the values of a source that sums rows; otherwise it is null.
template <class Source>
void encode_long_rows(const Source& source, const Layout& layout, int64_t rows, uint8_t* wire,
                      typename Source::Element* sums, cudaStream_t stream) {
  constexpr int64_t part = kMaxTeamRow<typename Source::Element>;
  const int64_t parts = ceil_div(layout.row_numel, part), chunks = ceil_div(layout.row_numel, kChunk);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(rows));
  launch(observe_parts<Source>, grid, Block::size, stream, source, layout, part, wire, sums);
  launch(write_headers<Source>, static_cast<unsigned>(rows), kWarp, stream, source, layout, parts, wire);
  const auto encode = [&](const auto& values) {
    launch(quantise_chunks<std::decay_t<decltype(values)>>, grid_of(rows, chunks, kThreads / kWarp), kThreads,
           stream, values, layout, rows, chunks, wire);
  };
  if constexpr (Source::kSumsRows)
    encode(Stored<Source>{source, sums});
  else
    encode(source);
}

template <class Source>
void encode_rows(const Source& source, const Layout& layout, int64_t rows, uint64_t key, int64_t first_row,
                 uint8_t* wire, typename Source::Element* sums, cudaStream_t stream) {
  constexpr Statistics statistics = Source::Codec::kStatistics;
  if (rows * layout.groups == 0) return;
  if constexpr (statistics == Statistics::row) {
    if (layout.row_numel > kMaxTeamRow<typename Source::Element> && rows <= kMaxRowsOfGrid)
      return encode_long_rows(source, layout, rows, wire, sums, stream);
  }
  const auto encode = [&](auto team) {
    launch(encode_groups<decltype(team), Source>, grid_of(rows, layout.groups, team.kThreads / team.size),
           team.kThreads, stream, team, source, layout, rows, key, first_row, wire);
  };
  const Lanes lanes = lanes_of<typename Source::Codec>(layout.group, Source::kWidth);
  if constexpr (statistics == Statistics::none || Source::Codec::kSummed)
    encode(lanes);
  else
    layout.group > kMaxWarpGroup<Source> ? encode(Block{}) : encode(lanes);
}

// Encodes source(the SumOfRows) as row `row_number` of the random numbers.
template <class T, class SourceOf>
void reduce_rows(const char* where, const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                 int64_t valid, double scale, uint8_t* out, void* scratch, int64_t row_number,
                 cudaStream_t stream, SourceOf source) {
  using Sum = Accumulate<T>;
  check_wire(where, out);
  dispatch<T>(spec, [&](auto codec) {
    using Codec = decltype(codec);
    const Layout layout = layout_of<Codec>(spec, row_numel);
    with_rows(where, wire, rows, [&](const auto& from) {
      using Wire = std::decay_t<decltype(from)>;
      const SumOfRows<Codec, Wire> sum{layout, from, rows, valid, static_cast<Sum>(scale)};
      encode_rows(source(sum), layout, 1, spec.key, row_number, out, static_cast<Sum*>(scratch), stream);
    });
  });
  check_launch(where, ErrorKind::codec);
}

}  // namespace

template <class T>
void Launches<T>::encode(const Spec& spec, Dtype source, const void* x, const Rows& rows, uint8_t* wire,
                         cudaStream_t stream) {
  check_wire("encode", wire);
  dispatch<T>(spec, [&](auto codec) {
    using Codec = decltype(codec);
    const auto run = [&](auto* from) {
      using Source = TensorRows<Codec, std::remove_const_t<std::remove_pointer_t<decltype(from)>>>;
      encode_rows(Source{from, rows}, layout_of<Codec>(spec, rows.row_numel), rows.rows, spec.key, 0, wire,
                  nullptr, stream);
    };
    if (source == spec.dtype)
      run(static_cast<const T*>(x));
    else
      run(static_cast<const Accumulate<T>*>(x));
  });
  check_launch("encode", ErrorKind::codec);
}

template <class T>
void Launches<T>::decode(const Spec& spec, const WireRows& wire, const Rows& rows, void* out,
                         cudaStream_t stream) {
  dispatch<T>(spec, [&](auto codec) {
    using Codec = decltype(codec);
    const Layout layout = layout_of<Codec>(spec, rows.row_numel);
    if (layout.row_bytes == 0 || rows.rows == 0 || rows.numel <= 0) return;
    const int64_t chunks = ceil_div(rows.row_numel, kChunk);
    with_rows("decode", wire, rows.rows, [&](const auto& from) {
      launch(decode_chunks<Codec, std::decay_t<decltype(from)>>, grid_of(rows.rows, chunks, kThreads / kWarp),
             kThreads, stream, layout, rows, chunks, from, static_cast<T*>(out));
    });
  });
  check_launch("decode", ErrorKind::codec);
}

template <class T>
void Launches<T>::decode_add(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                             int64_t valid, void* acc, cudaStream_t stream) {
  dispatch<T>(spec, [&](auto codec) {
    using Codec = decltype(codec);
    const Layout layout = layout_of<Codec>(spec, row_numel);
    if (valid <= 0 || rows == 0) return;
    const int64_t chunks = ceil_div(valid, kChunk);
    with_rows("decode_add", wire, rows, [&](const auto& from) {
      launch(decode_add_chunks<Codec, std::decay_t<decltype(from)>>, grid_of(1, chunks, kThreads / kWarp),
             kThreads, stream, layout, chunks, from, rows, valid, static_cast<Accumulate<T>*>(acc));
    });
  });
  check_launch("decode_add", ErrorKind::codec);
}

template <class T>
void Launches<T>::reduce_encode(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                                int64_t valid, double scale, uint8_t* out, void* scratch,
                                cudaStream_t stream) {
  reduce_rows<T>("reduce_encode", spec, wire, rows, row_numel, valid, scale, out, scratch, kReducedRow,
                 stream, [](const auto& sum) { return sum; });
}

template <class T>
void LaunchesWithError<T>::encode_with_error(const Spec& spec, Dtype source, const void* x, void* error,
                                             const Rows& rows, uint8_t* wire, cudaStream_t stream) {
  check_wire("encode_with_error", wire);
  dispatch<T>(spec, [&](auto codec) {
    using Codec = decltype(codec);
    const auto run = [&](auto* from) {
      using From = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
      const PlusError<TensorRows<Codec, From>> sum{{from, rows}, static_cast<T*>(error)};
      encode_rows(sum, layout_of<Codec>(spec, rows.row_numel), rows.rows, spec.key, 0, wire, nullptr, stream);
    };
    if (source == spec.dtype) return run(static_cast<const T*>(x));
    if constexpr (std::is_same_v<T, float>) {
      if (source == Dtype::f16) return run(static_cast<const Half*>(x));
      if (source == Dtype::bf16) return run(static_cast<const Bfloat*>(x));
    }
  });
  check_launch("encode_with_error", ErrorKind::codec);
}

template <class T>
void LaunchesWithError<T>::reduce_encode_with_error(const Spec& spec, const WireRows& wire, int64_t rows,
                                                    int64_t row_numel, int64_t valid, double scale,
                                                    uint8_t* out, void* scratch, void* error,
                                                    cudaStream_t stream) {
  reduce_rows<T>("reduce_encode_with_error", spec, wire, rows, row_numel, valid, scale, out, scratch, 0,
                 stream, [&](const auto& sum) {
                   return SumWithError<std::decay_t<decltype(sum)>>{sum, static_cast<T*>(error), 1.0 / scale};
                 });
}

}  // namespace gossamer::codec::cuda
