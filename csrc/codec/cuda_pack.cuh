// Packs: the consecutive elements, or codes, that a CUDA thread moves at once. There are four, or as many as have 16 bytes
// of codes. Codes of less than a byte are packed and unpacked here. Included by cuda_kernels.cuh only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/lanes.h"

namespace gossamer::device {
namespace {

constexpr int kWarpBits = 5, kWarp = 1 << kWarpBits;
constexpr int kPack = 4;

template <class T, int N = kPack>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  T v[N];
};

// Loads p[0, left), at most one pack; the rest of the pack is zero.
template <int N = kPack, class T>
__device__ Pack<T, N> load_pack(const T* p, int64_t left, bool aligned) {
  if (left >= N && aligned) return *reinterpret_cast<const Pack<T, N>*>(p);
  Pack<T, N> pack{};
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k < left) pack.v[k] = p[k];
  return pack;
}

template <class T, int N>
__device__ void store_pack(T* p, const Pack<T, N>& pack, int64_t left, bool aligned) {
  if (left >= N && aligned) {
#if defined(__CUDA_ARCH__)  // else nvcc may merge the two branches, and store single elements in both
    if constexpr (sizeof(pack) % 16 == 0) {
      constexpr int kWords = sizeof(pack) / 16;
      const auto words = bit_cast<Pack<uint4, kWords>>(pack);
      const auto to = __cvta_generic_to_global(p);
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + 16 * w), "r"(words.v[w].x),
                     "r"(words.v[w].y), "r"(words.v[w].z), "r"(words.v[w].w)
                     : "memory");
      return;
    }
#endif
    *reinterpret_cast<Pack<T, N>*>(p) = pack;
    return;
  }
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k < left) p[k] = pack.v[k];
}

template <int N, class T>
__device__ bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Pack<T, N>) == 0;
}

// The bits of codes i, i + 1, ... of a pack; `left` of them lie before the row's end. `codes` is 16-byte aligned and padded
// to 16 bytes, and i is a multiple of N. Beyond `left` the bits are those of the padding, or zero.
template <class Codec, int N>
__device__ auto load_bits(const uint8_t* codes, int64_t i, int64_t left) {
  if constexpr (N * Codec::kCodeBits == 128)
    return *reinterpret_cast<const uint4*>(codes + i / N * 16);
  else if constexpr (Codec::kCodeBits >= 8)
    return load_pack<N>(reinterpret_cast<const typename Codec::Code*>(codes) + i, left, true);
  else if constexpr (N * Codec::kCodeBits == 32)
    return *reinterpret_cast<const unsigned*>(codes + i / N * 4);
  else if constexpr (N * Codec::kCodeBits == 16)
    return unsigned{*reinterpret_cast<const uint16_t*>(codes + i / N * 2)};
  else
    return unsigned{codes[i * Codec::kCodeBits / 8]} >> (i * Codec::kCodeBits % 8);
}

template <class Codec, int N, class Bits>
__device__ Pack<typename Codec::Code, N> codes_of(const Bits& bits) {
  using Codes = Pack<typename Codec::Code, N>;
  if constexpr (Codec::kCodeBits >= 8) {
    return bit_cast<Codes>(bits);
  } else {
    constexpr int kInWord = 32 / Codec::kCodeBits;
    constexpr unsigned mask = (1u << Codec::kCodeBits) - 1;
    const auto words = bit_cast<Pack<unsigned, sizeof(Bits) / 4>>(bits);
    Codes codes;
#pragma unroll
    for (int k = 0; k < N; ++k) codes.v[k] = words.v[k / kInWord] >> (k % kInWord * Codec::kCodeBits) & mask;
    return codes;
  }
}

// Stores a pack, which has a byte of codes at least.
template <class Codec, int N>
__device__ void store_codes(uint8_t* codes, int64_t i, const Pack<typename Codec::Code, N>& pack,
                            int64_t left) {
  using Code = typename Codec::Code;
  if constexpr (Codec::kCodeBits >= 8) {
    store_pack(reinterpret_cast<Code*>(codes) + i, pack, left, true);
  } else {
    constexpr int kInWord = 32 / Codec::kCodeBits;
    Pack<unsigned, (N + kInWord - 1) / kInWord> words{};
#pragma unroll
    for (int k = 0; k < N; ++k)
      words.v[k / kInWord] |= unsigned{pack.v[k]} << (k % kInWord * Codec::kCodeBits);
    if constexpr (N * Codec::kCodeBits % 32 == 0) {
      constexpr int kWords = N * Codec::kCodeBits / 32;
      Pack<unsigned, kWords> all;
#pragma unroll
      for (int w = 0; w < kWords; ++w) all.v[w] = words.v[w];
      store_pack(reinterpret_cast<unsigned*>(codes) + i / N * kWords, all, kWords, true);
    } else if constexpr (N * Codec::kCodeBits == 16) {
      *reinterpret_cast<uint16_t*>(codes + i / N * 2) = static_cast<uint16_t>(words.v[0]);
    } else {
      static_assert(N * Codec::kCodeBits == 8, "threads do not share bytes");
      codes[i / N] = static_cast<uint8_t>(words.v[0]);
    }
  }
}

}  // namespace
}  // namespace gossamer::device
