// The CUDA kernels of every codec for float64 tensors.
#define GOSSAMER_ISA device
#include "codec/cuda_launches.cuh"

template struct gossamer::codec::cuda::Launches<double>;
template struct gossamer::codec::cuda::LaunchesWithError<double>;
