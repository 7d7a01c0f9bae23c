// flat/cuda.h: the segments of a bucket travel as one kernel argument, and every thread block takes a chunk
// of one segment. Never synchronises, allocates nothing. Flags: --fmad=false.
#define GOSSAMER_ISA device
#include "base/cuda_launch.cuh"
#include "flat/cuda.h"
#include "flat/move.h"

namespace gossamer::flat::cuda {
namespace {

using device::Scaled;
using device::with_element_type;

constexpr int kThreads = 256;
constexpr int64_t kChunk = 8192;  // elements of one thread block
// Segments of one launch: few, because a small argument is copied sooner; or as many as fit into the 32764 bytes of
// arguments that Volta and later take.
constexpr int kFew = 128, kMany = 1024;

// Segments move from[i] -> to[i]; from == nullptr writes zeros.
template <int kSize>
struct Table {
  const void* from[kSize];
  void* to[kSize];
  int64_t numel[kSize];
  int first_chunk[kSize + 1];
  int count;
};
static_assert(sizeof(Table<kMany>) + 64 <= 32764, "kernel arguments are limited");

template <class T>
struct alignas(16) Vector {
  T v[16 / sizeof(T)];
};

template <class T, int kSize>
__global__ void move_segments(const Table<kSize> __grid_constant__ table, Scaled<T> scaled, bool plain) {
  const int chunk = static_cast<int>(blockIdx.x);
  const int segment = device::segment_of(table.first_chunk, table.count, chunk);
  const int64_t begin = (chunk - table.first_chunk[segment]) * kChunk;
  const int64_t left = table.numel[segment] - begin;
  const int64_t count = left < kChunk ? left : kChunk;
  const bool zeros = table.from[segment] == nullptr, copies = plain || zeros;
  T* to = static_cast<T*>(table.to[segment]) + begin;
  const T* from = zeros ? to : static_cast<const T*>(table.from[segment]) + begin;

  constexpr int kWidth = 16 / sizeof(T);
  const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const int64_t wide = aligned ? count / kWidth : 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < wide; i += kThreads) {
    Vector<T> x{};
    if (!zeros) x = reinterpret_cast<const Vector<T>*>(from)[i];
    if (!copies)
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x.v[k] = scaled(x.v[k]);
    reinterpret_cast<Vector<T>*>(to)[i] = x;
  }
  for (int64_t i = wide * kWidth + threadIdx.x; i < count; i += kThreads) {
    T x{};
    if (!zeros) x = from[i];
    to[i] = copies ? x : scaled(x);
  }
}

// Collects moves and launches them a table at a time.
template <class T, int kSize>
class Mover {
 public:
  Mover(double scale, cudaStream_t stream)
      : scaled_{static_cast<decltype(scaled_.factor)>(scale)}, plain_(scale == 1.0), stream_(stream) {}

  void add(const void* from, int64_t numel, void* to) {
    if (numel <= 0 || (plain_ && from == to)) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
    GOSSAMER_CHECK(address % alignof(T) == 0, ErrorKind::config,
                   "flat: device memory must be aligned to its element type, got ", from, " -> ", to);
    table_.from[table_.count] = from;
    table_.to[table_.count] = to;
    table_.numel[table_.count] = numel;
    const auto chunks = static_cast<int>((numel + kChunk - 1) / kChunk);
    table_.first_chunk[table_.count + 1] = table_.first_chunk[table_.count] + chunks;
    if (++table_.count == kSize) launch();
  }

  void launch() {
    if (table_.count == 0) return;
    const auto chunks = static_cast<unsigned>(table_.first_chunk[table_.count]);
    device::launch(move_segments<T, kSize>, chunks, kThreads, stream_, table_, scaled_, plain_);
    table_.count = 0;
    device::check_launch("flat", ErrorKind::config);
  }

 private:
  Scaled<T> scaled_;
  bool plain_;
  cudaStream_t stream_;
  Table<kSize> table_{};
};

// body(mover, T{}) for the element type that `dtype` names; then launches what was added to the mover.
template <class Body>
void move(Dtype dtype, int64_t count, double scale, cudaStream_t stream, const Body& body) {
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto mover) {
      body(mover, element);
      mover.launch();
    };
    if (count <= kFew)
      run(Mover<T, kFew>(scale, stream));
    else
      run(Mover<T, kMany>(scale, stream));
  });
}

}  // namespace

void gather(Dtype dtype, const Segment* segments, int64_t count, void* flat, double scale,
            cudaStream_t stream) {
  move(dtype, count, scale, stream, [&](auto& mover, auto element) {
    auto* to = static_cast<decltype(element)*>(flat);
    for (const Segment* s = segments; s != segments + count; ++s)
      mover.add(s->tensor, s->numel, to + s->offset);
  });
}

void scatter(Dtype dtype, const Segment* segments, int64_t count, const void* flat, double scale,
             cudaStream_t stream) {
  move(dtype, count, scale, stream, [&](auto& mover, auto element) {
    const auto* from = static_cast<const decltype(element)*>(flat);
    for (const Segment* s = segments; s != segments + count; ++s)
      if (s->tensor != nullptr) mover.add(from + s->offset, s->numel, s->tensor);
  });
}

void scale(Dtype dtype, void* flat, int64_t numel, double scale, cudaStream_t stream) {
  const Segment whole{flat, 0, numel};
  gather(dtype, &whole, 1, flat, scale, stream);
}

}  // namespace gossamer::flat::cuda
