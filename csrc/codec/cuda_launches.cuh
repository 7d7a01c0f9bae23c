// The launches of cuda_launches.h: they choose the kernel and the grid for each call. The kernels are in
// cuda_kernels.cuh. Included once by each cuda_<dtype>.cu. Never synchronises. Flags: --fmad=false (contraction would
// change bytes), no --use_fast_math.
#pragma once

#include "base/cuda_launch.cuh"
#include "codec/cuda_kernels.cuh"
#include "codec/cuda_launches.h"

namespace gossamer::codec::cuda {
namespace {

using namespace gossamer::device;

constexpr int kThreads = 256;    // of a thread block made of warps
constexpr int kLargeTeam = 512;  // of a thread block that is one team
constexpr int64_t kMaxGrid = GOSSAMER_MAX_GRID;
constexpr int64_t kMaxWarpGroup = 4096;  // elements of a group that one warp handles
constexpr int64_t kMaxTeamRow = 32768;   // of a row that one team handles, where statistics span it
constexpr int64_t kPartNumel = 16384;    // of a part of a longer row
constexpr int64_t kMaxParts = 256;

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

// Chunks of at most kChunk elements that never straddle two groups.
int64_t chunk_numel(const Layout& layout, Statistics statistics) {
  if (statistics != Statistics::block) return kChunk;
  return layout.group > kChunk && layout.group % kChunk == 0 ? kChunk : layout.group;
}

unsigned grid_of(int64_t items, int64_t teams) {
  const int64_t blocks = ceil_div(items, teams);
  return static_cast<unsigned>(blocks < kMaxGrid ? blocks : kMaxGrid);
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

template <class Source>
void encode_long_rows(const Source& source, const Layout& layout, int64_t rows, uint8_t* wire,
                      cudaStream_t stream) {
  int64_t parts = ceil_div(layout.row_numel, kPartNumel);
  if (parts > kMaxParts) parts = kMaxParts;
  const int64_t part_numel = round_up(ceil_div(layout.row_numel, parts), kPack);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(rows));
  launch(observe_parts<kLargeTeam, Source>, grid, kLargeTeam, stream, source, layout, part_numel, wire);
  launch(write_headers<Source>, static_cast<unsigned>(rows), kWarp, stream, source, layout, parts, wire);
  const int64_t chunks = ceil_div(layout.row_numel, kChunk), items = rows * chunks;
  launch(quantise_chunks<Source>, grid_of(items, kThreads / kWarp), kThreads, stream, source, layout, chunks,
         items, wire);
}

template <class Source>
void encode_rows(const Source& source, const Layout& layout, int64_t rows, uint64_t key, int64_t first_row,
                 uint8_t* wire, cudaStream_t stream) {
  constexpr Statistics statistics = Source::Codec::kStatistics;
  const int64_t items = rows * layout.groups;
  if (items == 0) return;
  if constexpr (statistics == Statistics::row) {
    if (layout.row_numel > kMaxTeamRow && rows <= 65535)
      return encode_long_rows(source, layout, rows, wire, stream);
  }
  if constexpr (statistics != Statistics::none && !Source::Codec::kSummed) {
    if (layout.group > kMaxWarpGroup) {
      launch(encode_groups<kLargeTeam, Source>, grid_of(items, 1), kLargeTeam, stream, source, layout, items,
             key, first_row, wire);
      return;
    }
  }
  launch(encode_groups<kWarp, Source>, grid_of(items, kThreads / kWarp), kThreads, stream, source, layout,
         items, key, first_row, wire);
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
      encode_rows(Source{from, rows.row_numel, rows.numel}, layout_of<Codec>(spec, rows.row_numel), rows.rows,
                  spec.key, 0, wire, stream);
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
    if (layout.row_bytes == 0 || rows.rows == 0 || rows.numel == 0) return;
    const int64_t chunk = chunk_numel(layout, Codec::kStatistics);
    const int64_t chunks = ceil_div(rows.row_numel, chunk), items = rows.rows * chunks;
    with_rows("decode", wire, rows.rows, [&](const auto& from) {
      using Wire = std::decay_t<decltype(from)>;
      launch(decode_chunks<Codec, Wire>, grid_of(items, kThreads / kWarp), kThreads, stream, layout, chunk,
             chunks, items, from, rows.numel, static_cast<T*>(out));
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
    const int64_t chunk = chunk_numel(layout, Codec::kStatistics), chunks = ceil_div(valid, chunk);
    with_rows("decode_add", wire, rows, [&](const auto& from) {
      using Wire = std::decay_t<decltype(from)>;
      launch(decode_add_chunks<Codec, Wire>, grid_of(chunks, kThreads / kWarp), kThreads, stream, layout,
             chunk, chunks, from, rows, valid, static_cast<Accumulate<T>*>(acc));
    });
  });
  check_launch("decode_add", ErrorKind::codec);
}

// `scratch` is not used: the sum is computed twice, the second time from cache.
template <class T>
void Launches<T>::reduce_encode(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                                int64_t valid, double scale, uint8_t* out, void*, cudaStream_t stream) {
  check_wire("reduce_encode", out);
  dispatch<T>(spec, [&](auto codec) {
    using Codec = decltype(codec);
    const Layout layout = layout_of<Codec>(spec, row_numel);
    with_rows("reduce_encode", wire, rows, [&](const auto& from) {
      using Wire = std::decay_t<decltype(from)>;
      const SumOfRows<Codec, Wire> source{layout, from, rows, valid, static_cast<Accumulate<T>>(scale)};
      encode_rows(source, layout, 1, spec.key, kReducedRow, out, stream);
    });
  });
  check_launch("reduce_encode", ErrorKind::codec);
}

}  // namespace gossamer::codec::cuda
