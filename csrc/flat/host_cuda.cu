// map_host of flat/cuda.h: memory of the host, which several processes may map, for the kernels of this process. Each process
// registers its own mapping. So GPUs that cannot read each other's memory meet in memory that all of them read and write.
#include "base/check.h"
#include "flat/cuda.h"

namespace gossamer::flat::cuda {
namespace {

void require(cudaError_t status, const char* call, int64_t bytes) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // a later launch must not report it
  raise(ErrorKind::comm, "map_host: ", call, " of ", bytes, " bytes failed: ", cudaGetErrorString(status));
}

}  // namespace

void* map_host(void* memory, int64_t bytes) {
  const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  require(cudaHostRegister(memory, static_cast<size_t>(bytes), flags), "cudaHostRegister", bytes);
  void* address = nullptr;
  const cudaError_t status = cudaHostGetDevicePointer(&address, memory, 0);
  if (status != cudaSuccess) unmap_host(memory);
  require(status, "cudaHostGetDevicePointer", bytes);
  return address;
}

void unmap_host(void* memory) {
  if (cudaHostUnregister(memory) != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace gossamer::flat::cuda
