// A stand-in for CUDA's header, so that a host compiler with sanitizers builds the kernels and emulator.cpp runs them. It has
// the names that csrc/'s .cu files and tests/cpp/cuda use; add what a kernel needs. One thread of the host runs the blocks of
// a grid one after another, and a fiber for each thread of the block. It checks what a GPU leaves undefined: all threads
// must meet at the same __syncthreads, and the lanes of a mask at the same call. What it does not show: the device-only
// branches (__CUDA_ARCH__) of lanes.h and lane.h, races between blocks that run at once, and weakly ordered memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define __host__
#define __device__
#define __global__
#define __grid_constant__ &  // after the type of the parameter, so that threads share it
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// Blocks run one after another, so one copy serves all. shared.ld gathers the copies.
#define __shared__ static
#define warpSize 32

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 : uint3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : uint3{x, y, z} {}
};
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

// ---- what kernels call; emulator.cpp has the scheduler

namespace emulator {

// The place in a kernel that calls.
struct Place {
  const char* file;
  int line;
};
// What a lane brings to a meeting of lanes, and what it leaves with.
struct Lane {
  uint64_t value;
  int source;  // the lane whose value it wants
  uint64_t result;
};
using Finish = void (*)(Lane* lanes, unsigned mask);  // lanes[l].result for each l in mask

void meet_block(Place place);
uint64_t meet_lanes(const char* name, unsigned mask, Lane lane, Finish finish, Place place);
int lane();  // of the calling thread
void let_others_run();
// Ends the process. Not [[noreturn]]: before such a call AddressSanitizer looks for the stack that it knows.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void* dynamic_shared();  // of this block, as large as its launch says

template <class T>
T exchanged(const char* name, unsigned mask, T value, int source, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves up to eight bytes");
  Lane mine{0, source, 0};
  memcpy(&mine.value, &value, sizeof(T));
  const uint64_t got = meet_lanes(
      name, mask, mine,
      [](Lane* lanes, unsigned named) {
        for (int l = 0; l < 32; ++l) {
          if (!(named >> l & 1)) continue;
          if (!(named >> lanes[l].source & 1))
            fail("lane %d reads lane %d, which the mask %#x does not name", l, lanes[l].source, named);
          lanes[l].result = lanes[lanes[l].source].value;
        }
      },
      place);
  memcpy(&value, &got, sizeof(T));
  return value;
}

template <class T, class Change>
T changed(T* p, Change change) {
  const T before = *p;
  *p = change(before);
  return before;
}

}  // namespace emulator

#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_PLACE) { emulator::meet_block({file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_PLACE) {
  emulator::meet_lanes("__syncwarp", mask, {}, [](emulator::Lane*, unsigned) {}, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
  const auto finish = [](emulator::Lane* lanes, unsigned named) {
    uint64_t ballot = 0;
    for (int l = 0; l < 32; ++l)
      if (named >> l & 1) ballot |= lanes[l].value << l;
    for (int l = 0; l < 32; ++l) lanes[l].result = ballot;
  };
  const uint64_t vote = predicate != 0;
  return static_cast<unsigned>(
      emulator::meet_lanes("__ballot_sync", mask, {vote, 0, 0}, finish, {file, line}));
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
  return __ballot_sync(mask, predicate, file, line) == mask;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

// Beyond its segment of `width` lanes a lane gets its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_PLACE) {
  const int first = emulator::lane() & -width;
  return emulator::exchanged("__shfl_sync", mask, value, first + (source & (width - 1)), {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_PLACE) {
  const int lane = emulator::lane(), other = lane ^ bits;
  const int source = other < (lane & -width) + width ? other : lane;
  return emulator::exchanged("__shfl_xor_sync", mask, value, source, {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_PLACE) {
  const int lane = emulator::lane(), other = lane + static_cast<int>(delta);
  const int source = other < (lane & -width) + width ? other : lane;
  return emulator::exchanged("__shfl_down_sync", mask, value, source, {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_PLACE) {
  const int lane = emulator::lane(), other = lane - static_cast<int>(delta);
  const int source = other >= (lane & -width) ? other : lane;
  return emulator::exchanged("__shfl_up_sync", mask, value, source, {file, line});
}

template <class T>
T atomicAdd(T* p, std::common_type_t<T> x) {
  return emulator::changed(p, [x](T old) { return old + x; });
}
template <class T>
T atomicMax(T* p, std::common_type_t<T> x) {
  return emulator::changed(p, [x](T old) { return old < x ? x : old; });
}
template <class T>
T atomicMin(T* p, std::common_type_t<T> x) {
  return emulator::changed(p, [x](T old) { return x < old ? x : old; });
}
template <class T>
T atomicExch(T* p, std::common_type_t<T> x) {
  return emulator::changed(p, [x](T) { return x; });
}
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> x) {
  return emulator::changed(p, [=](T old) { return old == expected ? x : old; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// Goes on by one at each call. A thread that looks at the clock waits for something, so others run first.
inline long long clock64() {
  static long long clocks = 0;
  emulator::let_others_run();
  return ++clocks;
}
inline void __trap() { emulator::fail("a kernel called __trap"); }

// ---- what the host calls. Every call has done its work when it returns, so all streams are in order.

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum cudaDeviceAttr { cudaDevAttrClockRate = 13, cudaDevAttrMultiProcessorCount = 16 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

namespace emulator {
cudaError_t run(const cudaLaunchConfig_t& config, size_t argument_bytes, const void* kernel,
                void (*body)(const void*), const void* context);
size_t launches();  // of the process so far
}  // namespace emulator

cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaMalloc(void** p, size_t bytes);
// Kernels see shared memory of the host at an address of its own, until it is unregistered.
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags);
cudaError_t cudaHostGetDevicePointer(void** address, void* memory, unsigned flags);
cudaError_t cudaHostUnregister(void* memory);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);

inline cudaError_t cudaFree(void* p) {
  free(p);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemsetAsync(void* p, int byte, size_t bytes, cudaStream_t) {
  if (bytes > 0) memset(p, byte, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value =
      4;  // kHz; or multiprocessors: few, so that a grid made for them leaves several pieces to each block
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr) { return cudaSuccess; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const auto call = [&] { kernel(arguments...); };  // every thread has its own copy of the arguments
  return emulator::run(
      *config, (sizeof(Parameters) + ... + 0), reinterpret_cast<const void*>(kernel),
      [](const void* context) { (*static_cast<const decltype(call)*>(context))(); }, &call);
}
