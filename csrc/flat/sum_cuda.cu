// sum_rows of flat/cuda.h: one launch reads every row and writes the result into every out. The rows are usually the
// memory of other ranks, so each element crosses to this GPU once and back once. The link is the limit, so a few blocks do
// it, and leave the other multiprocessors to the backward pass. Ranks read the rows in different orders, so that they do
// not all read from one peer at once, and add them in one order. Never synchronises with the host, allocates nothing.
// Flags: --fmad=false.
#define GOSSAMER_ISA device
#include "base/cuda_launch.cuh"
#include "flat/cuda.h"
#include "flat/move.h"

namespace gossamer::flat::cuda {
namespace {

using device::Summed;
using device::with_element_type;

constexpr int kThreads = 512;
constexpr int64_t kMostBlocks = 32;  // beyond it a thread takes several packs
constexpr int64_t kMaxGrid = GOSSAMER_MAX_GRID < kMostBlocks ? GOSSAMER_MAX_GRID : kMostBlocks;
constexpr int kAtOnce = 8;  // rows whose loads a thread has in flight

struct Table {
  const void* row[kMaxRows];
  void* out[kMaxRows];
  int count, out_count;
  int first, first_out;  // where this rank begins to read, in each kAtOnce rows, and to write
};

template <class T>
struct alignas(16) Pack {
  static constexpr int kWidth = 16 / sizeof(T);
  T v[kWidth];
};

// Piece i of `left` rows from `base` on, at most kAtOnce. Load j is of row base + (j ^ first): any two ranks with different
// `first` then differ in each load. Afterwards piece j is of row base + j.
template <class Piece>
__device__ void load_pieces(const Table& table, int base, int left, int first, int64_t i,
                            Piece (&pieces)[kAtOnce]) {
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j)
    if ((j ^ first) < left) pieces[j] = static_cast<const Piece*>(table.row[base + (j ^ first)])[i];
#pragma unroll
  for (int bit = 1; bit < kAtOnce; bit *= 2)
    if (first & bit)
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (!(j & bit)) {
          const Piece other = pieces[j];
          pieces[j] = pieces[j + bit];
          pieces[j + bit] = other;
        }
}

// Pieces of kWidth elements, 16-byte aligned in every row if kWide, else of one element. A thread reads its piece of all
// rows before it writes it into any.
template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads)
    sum_pieces(Table table, int64_t pieces, typename Summed<T>::Sum scale) {
  using Piece = std::conditional_t<kWide, Pack<T>, T>;
  constexpr int kWidth = sizeof(Piece) / sizeof(T);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pieces; i += step) {
    typename Summed<T>::Sum sums[kWidth] = {};
    for (int base = 0; base < table.count; base += kAtOnce) {
      const int left = table.count - base;
      Piece loaded[kAtOnce] = {};
      load_pieces(table, base, left, table.first, i, loaded);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (j < left)
#pragma unroll
          for (int k = 0; k < kWidth; ++k) Summed<T>::add(sums[k], reinterpret_cast<const T*>(&loaded[j])[k]);
    }
    Piece result;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) reinterpret_cast<T*>(&result)[k] = Summed<T>::finish(sums[k], scale);
#pragma unroll 4
    for (int j = 0; j < table.out_count; ++j) {
      const int r = table.first_out + j;
      static_cast<Piece*>(table.out[r < table.out_count ? r : r - table.out_count])[i] = result;
    }
  }
}

template <class T, bool kWide>
void launch(const Table& table, int64_t pieces, double scale, cudaStream_t stream) {
  if (pieces == 0) return;
  const int64_t blocks = (pieces + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(blocks < kMaxGrid ? blocks : kMaxGrid);
  device::launch(sum_pieces<T, kWide>, grid, kThreads, stream, table, pieces,
                 static_cast<typename Summed<T>::Sum>(scale));
  device::check_launch("sum_rows", ErrorKind::config);
}

}  // namespace

void sum_rows(Dtype dtype, const RowSum& sum, double scale, cudaStream_t stream) {
  GOSSAMER_CHECK(sum.count <= kMaxRows && sum.out_count <= kMaxRows, ErrorKind::config, "sum_rows: at most ",
                 kMaxRows, " rows and outs, got ", sum.count, " and ", sum.out_count);
  if (sum.out_count == 0) return;
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    Table table{};
    table.count = static_cast<int>(sum.count);
    table.out_count = static_cast<int>(sum.out_count);
    table.first = static_cast<int>(sum.first % kAtOnce);
    table.first_out = static_cast<int>(sum.first % sum.out_count);
    uintptr_t address = 0;
    const auto place = [&](int64_t done) {
      for (int64_t r = 0; r < sum.count; ++r)
        address |= reinterpret_cast<uintptr_t>(table.row[r] = static_cast<const T*>(sum.rows[r]) + done);
      for (int64_t r = 0; r < sum.out_count; ++r)
        address |= reinterpret_cast<uintptr_t>(table.out[r] = static_cast<T*>(sum.outs[r]) + done);
    };
    place(0);
    GOSSAMER_CHECK(address % alignof(T) == 0, ErrorKind::config,
                   "sum_rows: device memory must be aligned to its element type, got rows from ", sum.rows[0],
                   " and outs from ", sum.outs[0]);
    const int64_t packs = address % 16 == 0 ? sum.numel / Pack<T>::kWidth : 0;
    launch<T, true>(table, packs, scale, stream);
    const int64_t done = packs * Pack<T>::kWidth;
    place(done);
    launch<T, false>(table, sum.numel - done, scale, stream);
  });
}

}  // namespace gossamer::flat::cuda
