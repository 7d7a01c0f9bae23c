// HD marks a small function that is compiled for the host and, under nvcc, for the device as well.
// Forced inline on the host, so that no copy compiled with AVX flags can stand in for a plain one.
//
// GOSSAMER_ISA is the namespace of everything whose code depends on the compile flags: each translation
// unit that sets such flags defines it first (avx2, avx512, device), so equal names never share a symbol.
#pragma once

#if defined(__CUDACC__)
#define HD __host__ __device__ __forceinline__
#else
#define HD inline __attribute__((always_inline))
#endif

#ifndef GOSSAMER_ISA
#define GOSSAMER_ISA scalar
#endif
