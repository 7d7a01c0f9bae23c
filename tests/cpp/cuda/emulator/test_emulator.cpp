// What the emulator gives kernels and the kernels of csrc/ do not use yet: __syncwarp, votes, partial masks, atomics, dynamic
// shared memory; and which launches it refuses. A kernel file of its own, compiled and linked as those are.
#include <gtest/gtest.h>

#include <vector>

#define GOSSAMER_ISA device
#include "base/cuda_launch.cuh"

namespace gossamer::test {
namespace {

class Emulator : public testing::Test {};

// Runs a kernel on a block of 64 threads until each order of the threads has had its turn. What it leaves in `out`.
template <class Kernel>
std::vector<int> results_of(Kernel kernel, size_t dynamic_bytes = 0) {
  std::vector<int> first;
  for (int order = 0; order < 3; ++order) {
    int* out = nullptr;
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&out), 64 * sizeof(int)), cudaSuccess);
    cudaLaunchConfig_t config{};
    config.gridDim = 2;
    config.blockDim = 64;
    config.dynamicSmemBytes = dynamic_bytes;
    EXPECT_EQ(cudaLaunchKernelEx(&config, kernel, out), cudaSuccess);
    const std::vector<int> found(out, out + 64);
    cudaFree(out);
    if (order == 0) first = found;
    EXPECT_EQ(found, first);
  }
  return first;
}

__global__ void reverse_in_warps(int* out) {
  __shared__ int memory[64];
  const int i = static_cast<int>(threadIdx.x);
  memory[i] = 100 + i;
  __syncwarp();
  out[i] = memory[i / 32 * 32 + 31 - i % 32];
}

TEST_F(Emulator, LanesSeeWhatOtherLanesWroteBeforeSyncwarp) {
  const auto found = results_of(reverse_in_warps);
  for (int i = 0; i < 64; ++i) ASSERT_EQ(found[i], 100 + i / 32 * 32 + 31 - i % 32);
}

__global__ void exchange(int* out) {
  const int i = static_cast<int>(threadIdx.x), lane = i % 32;
  int sum = 0;
  if (lane < 8) {
    sum = static_cast<int>(__ballot_sync(0xffu, lane % 2)) + 1000 * __any_sync(0xffu, lane == 9) +
          2000 * __all_sync(0xffu, lane < 8);
  } else {
    sum = __shfl_sync(0xffffff00u, i, 8) + __shfl_up_sync(0xffffff00u, i, 4, 8) +
          __shfl_down_sync(0xffffff00u, i, 4, 8) + __shfl_xor_sync(0xffffff00u, i, 1);
  }
  out[i] = sum;
}

TEST_F(Emulator, LanesExchangeWithinTheirMaskAndWidth) {
  const auto found = results_of(exchange);
  for (int i = 0; i < 64; ++i) {
    const int lane = i % 32, first = i / 32 * 32;
    const int up = lane % 8 >= 4 ? i - 4 : i, down = lane % 8 < 4 ? i + 4 : i;
    ASSERT_EQ(found[i], lane < 8 ? 0xaa + 2000 : first + 8 + up + down + (i ^ 1)) << i;
  }
}

__global__ void count(int* out) {
  __shared__ int total;
  int* copies = static_cast<int*>(emulator::dynamic_shared());
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  atomicAdd(&total, 2);
  atomicMax(&total, 1);
  __syncthreads();
  copies[threadIdx.x] = total;
  __syncthreads();
  out[threadIdx.x] = copies[63 - threadIdx.x];
}

TEST_F(Emulator, ThreadsAddToOneNumberAndReadEachOthersDynamicMemory) {
  for (int total : results_of(count, 64 * sizeof(int))) ASSERT_EQ(total, 128);
}

__global__ void nothing() {}

TEST_F(Emulator, LaunchesBeyondTheLimitsOfAGpuAreRefused) {
  const auto launched = [](dim3 grid, dim3 threads, size_t dynamic_bytes) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = dynamic_bytes;
    const cudaError_t status = cudaLaunchKernelEx(&config, nothing);
    EXPECT_EQ(cudaGetLastError(), status);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    return status == cudaSuccess;
  };
  ASSERT_TRUE(launched(3, 1024, 48 << 10));
  ASSERT_TRUE(launched({2, 3, 2}, {8, 4, 2}, 0));
  ASSERT_TRUE(!launched(0, 32, 0));
  ASSERT_TRUE(!launched(1, 0, 0));
  ASSERT_TRUE(!launched(1, 1025, 0));
  ASSERT_TRUE(!launched({1, 65536, 1}, 1, 0));
  ASSERT_TRUE(!launched(1, 32, (48 << 10) + 1));
  const void* kernel = reinterpret_cast<const void*>(nothing);
  ASSERT_TRUE(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10) ==
              cudaSuccess);
  ASSERT_TRUE(launched(1, 32, 64 << 10));
  ASSERT_TRUE(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) !=
              cudaSuccess);
}

}  // namespace
}  // namespace gossamer::test
