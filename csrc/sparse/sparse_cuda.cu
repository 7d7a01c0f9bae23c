// sparse.h for CUDA: a thread block takes a chunk, first in encode and last in decode_add. The bytes are the CPU's, because
// which elements are sent is a matter of integers, and the sums of their levels have one order (entry.h). Never synchronises
// with the host, allocates nothing.
#define GOSSAMER_ISA device
#include <algorithm>

#include "base/cuda_launch.cuh"
#include "sparse/entry.h"

namespace gossamer::sparse {
namespace {

using namespace gossamer::device;

constexpr int kWarp = 32, kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kHeld =
    16;  // magnitudes that a thread keeps in registers; those of larger chunks are read again
constexpr unsigned kAll = 0xffffffffu;

__device__ int larger(int x, int y) { return x > y ? x : y; }
__device__ int warp_sum(int x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}
__device__ int warp_max(int x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = larger(x, __shfl_xor_sync(kAll, x, offset));
  return x;
}

// The magnitudes of a chunk. A warp has elements that follow each other, a lane every 32nd one of them.
struct Magnitudes {
  const float* x;
  int count, first, end;  // of the lane's elements: first, first + 32, ... below end
  int held[kHeld];

  __device__ Magnitudes(const float* x, int count, int chunk) : x(x), count(count) {
    const int span = (chunk / kWarp + kWarps - 1) / kWarps * kWarp, warp = threadIdx.x / kWarp;
    first = warp * span + threadIdx.x % kWarp;
    end = (warp + 1) * span;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) held[k] = read(first + k * kWarp);
  }
  // body(index, magnitude) for each element that the lane may have, in order; 0 beyond the chunk. The lanes of a warp make
  // as many calls.
  template <class Body>
  __device__ void each(Body body) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (first + k * kWarp < end) body(first + k * kWarp, held[k]);
    for (int i = first + kHeld * kWarp; i < end; i += kWarp) body(i, read(i));
  }

 private:
  __device__ int read(int i) const { return i < end && i < count ? magnitude_bits(x[i]) : 0; }
};

// Numbers that the warps exchange. Two sets, used in turn, need one barrier an exchange.
struct Exchange {
  int of_warps[2][kWarps];
};

template <class Combine>
__device__ int over_block(Exchange& shared, int& turn, int of_warp, Combine combine) {
  turn ^= 1;
  if (threadIdx.x % kWarp == 0) shared.of_warps[turn][threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  int all = shared.of_warps[turn][0];
  for (int w = 1; w < kWarps; ++w) all = combine(all, shared.of_warps[turn][w]);
  return all;
}

// What the kept magnitudes add up to, in the order of entry.h. Called by one whole warp.
struct WarpSums {
  const float* values;
  int count;

  __device__ Above operator()(double split) const {
    double sum = 0;
    int above = 0;
    for (int j = threadIdx.x; j < count; j += kWarp) {
      const double magnitude = bit_cast<float>(magnitude_bits(values[j]));
      const bool is_above = magnitude > split;
      sum += is_above ? magnitude : 0.0;
      above += is_above ? 1 : 0;
    }
    for (int width = kSumsAtOnce / 2; width > 0; width /= 2) sum += __shfl_xor_sync(kAll, sum, width);
    return {sum, warp_sum(above)};
  }
};
static_assert(kSumsAtOnce == kWarp, "a lane has one partial sum");

__device__ uint8_t byte_of_indices(const Entry& layout, const int* index, int count, int byte) {
  unsigned value = 0;
  for (int bit = 0; bit < 8; ++bit) {
    const int place = byte * 8 + bit, slot = place / layout.index_bits;
    if (slot < count) value |= (index[slot] >> place % layout.index_bits & 1u) << bit;
  }
  return static_cast<uint8_t>(value);
}

__device__ uint8_t byte_of_values(const float* values, int count, double split, int byte) {
  unsigned value = 0;
  for (int k = 0; k < 4; ++k) {
    const int slot = byte * 4 + k;
    if (slot >= count) break;
    const uint32_t bits = bit_cast<uint32_t>(values[slot]);
    const bool high = bit_cast<float>(bits & 0x7fffffffu) > split;
    value |= (bits >> 31 | (high ? 2u : 0u)) << 2 * k;
  }
  return static_cast<uint8_t>(value);
}

__global__ void __launch_bounds__(kThreads) encode_chunks(Format format, const float* x, int64_t chunks,
                                                          int64_t row_numel, int64_t all, uint8_t* wire) {
  __shared__ Exchange exchange;
  __shared__ int index[kMaxKept];
  __shared__ float value[kMaxKept];
  __shared__ Levels shared_levels;
  const Entry layout(format);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int turn = 0;
  for (int64_t c = blockIdx.x; c < all; c += gridDim.x) {
    const int64_t row = c / chunks, begin = c % chunks * format.chunk, left = row_numel - begin;
    const int count = static_cast<int>(left < format.chunk ? left : format.chunk);
    const float* chunk = x + row * row_numel + begin;
    uint8_t* entry = wire + c * layout.bytes;
    const Magnitudes magnitudes(chunk, count, static_cast<int>(format.chunk));
    const int wanted = layout.kept < count ? static_cast<int>(layout.kept) : count;

    int most = 0;
    magnitudes.each([&](int, int bits) { most = larger(most, bits); });
    const int largest = over_block(exchange, turn, warp_max(most), larger);
    const auto at_least = [&](int threshold) {
      int found = 0;
      magnitudes.each([&](int, int bits) { found += bits >= threshold ? 1 : 0; });
      return over_block(exchange, turn, warp_sum(found), [](int a, int b) { return a + b; });
    };

    int kept = 0;
    const bool finite = static_cast<uint32_t>(largest) < kInfinityBits;
    if (finite && largest > 0) {
      // The largest threshold that `wanted` reach, or 1.
      int low = 1, high = largest + 1, above = 0;  // above: how many reach `high`
      bool bounded = false;
      for (int64_t step = int64_t{1} << 22; high - low > 1; step *= 2) {
        if (step >= high - low) bounded = true;
        const int tried = bounded ? low + (high - low) / 2 : static_cast<int>(high - step);
        const int found = at_least(tried);
        if (found >= wanted) {
          low = tried;
          bounded = true;
        } else {
          high = tried;
          above = found;
        }
      }
      // Then high is low + 1, so all of `above` are sent, and of those at the threshold the first ones.
      const int equal = wanted - above;
      int over = 0, ties = 0;
      magnitudes.each([&](int, int bits) {
        over += bits > low ? 1 : 0;
        ties += bits == low ? 1 : 0;
      });
      // Both are at most 16384.
      const int pair = warp_sum(over | ties << 16);
      int before = 0, of_all = 0;
      over_block(exchange, turn, pair, [](int a, int) { return a; });
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) before += exchange.of_warps[turn][w];
        of_all += exchange.of_warps[turn][w];
      }
      int over_before = before & 0xffff, ties_before = before >> 16;
      const int tied = of_all >> 16;
      kept = above + (tied < equal ? tied : equal);
      const unsigned lower = (1u << lane) - 1;
      magnitudes.each([&](int i, int bits) {
        const unsigned greater = __ballot_sync(kAll, bits > low), same = __ballot_sync(kAll, bits == low);
        const int my_over = over_before + __popc(greater & lower);
        const int my_ties = ties_before + __popc(same & lower);
        if (bits > low || (bits == low && my_ties < equal)) {
          const int place = my_over + (my_ties < equal ? my_ties : equal);
          index[place] = i;
          value[place] = chunk[i];
        }
        over_before += __popc(greater);
        ties_before += __popc(same);
      });
      __syncthreads();
      if (warp == 0) {
        const Levels levels = levels_of(WarpSums{value, kept});
        if (lane == 0) shared_levels = levels;
      }
      __syncthreads();
    }
    const Levels levels = kept > 0 ? shared_levels : Levels{0, 0};
    const uint32_t header = finite ? header_of(levels) : kNanHeader;
    if (header == 0) kept = 0;  // too small for a bfloat16
    for (int64_t b = threadIdx.x; b < layout.bytes; b += kThreads) {
      const int64_t of_indices = b - Entry::kHeader, of_values = of_indices - layout.index_bytes;
      if (of_indices < 0)
        entry[b] = static_cast<uint8_t>(header >> 8 * b);
      else if (of_values < 0)
        entry[b] = byte_of_indices(layout, index, kept, static_cast<int>(of_indices));
      else
        entry[b] = byte_of_values(value, kept, levels.split(), static_cast<int>(of_values));
    }
    __syncthreads();  // before the next chunk's indices are written
  }
}

template <class Sum>
__global__ void __launch_bounds__(kThreads)
    add_rows(Format format, const uint8_t* wire, int64_t rows, int64_t row_numel, int64_t chunks, Sum* acc) {
  const Entry layout(format);
  for (int64_t c = blockIdx.x; c < chunks; c += gridDim.x) {
    const int64_t begin = c * format.chunk, left = row_numel - begin;
    const int64_t count = left < format.chunk ? left : format.chunk;
    Sum* sums = acc + begin;
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* entry = wire + (r * chunks + c) * layout.bytes;
      const uint32_t header = read_header(entry);
      const float low = low_of(header), high = high_of(header);
      if (header != 0 && low != low) {
        for (int64_t i = threadIdx.x; i < count; i += kThreads) sums[i] += low;
      } else if (header != 0) {
        for (int64_t slot = threadIdx.x; slot < layout.kept; slot += kThreads) {
          const int64_t index = read_index(layout, entry, slot);
          if ((slot == 0 || index > 0) && index < count)
            sums[index] += read_value(layout, entry, slot, low, high);
        }
      }
      __syncthreads();  // the next row adds to the same sums
    }
  }
}

unsigned grid_of(int64_t chunks) {
  return static_cast<unsigned>(std::min<int64_t>(chunks, GOSSAMER_MAX_GRID));
}

void encode(const Format& format, const float* x, int64_t rows, int64_t row_numel, uint8_t* wire,
            void* stream) {
  if (rows == 0 || row_bytes(format, row_numel) == 0) return;
  const int64_t chunks = (row_numel + format.chunk - 1) / format.chunk;
  launch(encode_chunks, grid_of(rows * chunks), kThreads, static_cast<cudaStream_t>(stream), format, x,
         chunks, row_numel, rows * chunks, wire);
  check_launch("ChunkTopK.encode", ErrorKind::codec);
}

void decode_add(const Format& format, const uint8_t* wire, int64_t rows, int64_t row_numel, Dtype dtype,
                void* acc, void* stream) {
  if (rows == 0 || row_bytes(format, row_numel) == 0) return;
  const int64_t chunks = (row_numel + format.chunk - 1) / format.chunk;
  const auto run = [&](auto* sums) {
    launch(add_rows<std::remove_pointer_t<decltype(sums)>>, grid_of(chunks), kThreads,
           static_cast<cudaStream_t>(stream), format, wire, rows, row_numel, chunks, sums);
  };
  if (dtype == Dtype::f64)
    run(static_cast<double*>(acc));
  else
    run(static_cast<float*>(acc));
  check_launch("ChunkTopK.decode_add", ErrorKind::codec);
}

const DeviceKernels kCuda{encode, decode_add};
[[maybe_unused]] const bool kernels_hooked = (cuda_kernels() = &kCuda, true);

}  // namespace
}  // namespace gossamer::sparse
