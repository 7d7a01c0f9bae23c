// The CUDA kernels of every codec for float32 tensors.
#define GOSSAMER_ISA device
#include "codec/cuda_launches.cuh"

template struct gossamer::codec::cuda::Launches<float>;
template struct gossamer::codec::cuda::LaunchesWithError<float>;
