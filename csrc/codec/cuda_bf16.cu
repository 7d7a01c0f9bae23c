// The CUDA kernels of every codec for bfloat16 tensors.
#define GOSSAMER_ISA device
#include "codec/cuda_launches.cuh"

template struct gossamer::codec::cuda::Launches<gossamer::device::Bfloat>;
