// Packs: the four consecutive elements, or codes, that a CUDA thread moves at once. Codes of less than a byte are
// packed and unpacked here. Included by cuda_kernels.cuh only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/lanes.h"

namespace gossamer::device {
namespace {

constexpr int kWarp = 32;
constexpr int kPack = 4;

template <class T>
struct alignas(kPack * sizeof(T) < 16 ? kPack * sizeof(T) : 16) Pack {
  T v[kPack];
};

// Loads p[0, left), at most one pack; the rest of the pack is zero.
template <class T>
__device__ Pack<T> load_pack(const T* p, int64_t left, bool aligned) {
  if (left >= kPack && aligned) return *reinterpret_cast<const Pack<T>*>(p);
  Pack<T> pack{};
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (k < left) pack.v[k] = p[k];
  return pack;
}

template <class T>
__device__ void store_pack(T* p, const Pack<T>& pack, int64_t left, bool aligned) {
  if (left >= kPack && aligned) {
#if defined(__CUDA_ARCH__)  // else nvcc may merge the two branches, and store single elements in both
    if constexpr (sizeof(pack) == 16) {
      const auto words = bit_cast<uint4>(pack);
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
                   "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                   : "memory");
      return;
    }
#endif
    *reinterpret_cast<Pack<T>*>(p) = pack;
    return;
  }
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (k < left) p[k] = pack.v[k];
}

template <class T>
__device__ bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Pack<T>) == 0;
}

// Codes i, i + 1, ... of a pack; `left` of them lie before the row's end. `codes` is 16-byte aligned, and i is a multiple
// of kPack. Codes that share bytes are unpacked; beyond `left` the pack then holds what the padding holds.
template <class Codec>
__device__ Pack<typename Codec::Code> load_codes(const uint8_t* codes, int64_t i, int64_t left) {
  using Code = typename Codec::Code;
  if constexpr (Codec::kCodeBits >= 8) {
    return load_pack(reinterpret_cast<const Code*>(codes) + i, left, true);
  } else {
    constexpr unsigned mask = (1u << Codec::kCodeBits) - 1;
    unsigned bits;
    if constexpr (Codec::kCodeBits == 4)
      bits = *reinterpret_cast<const uint16_t*>(codes + i / 2);
    else
      bits = codes[i / 8] >> (i % 8);
    Pack<Code> pack;
#pragma unroll
    for (int k = 0; k < kPack; ++k) pack.v[k] = bits >> (k * Codec::kCodeBits) & mask;
    return pack;
  }
}

// Stores a pack. Two threads share a byte of single bits: the even one writes it, so the whole warp must call this.
template <class Codec>
__device__ void store_codes(uint8_t* codes, int64_t i, const Pack<typename Codec::Code>& pack, int64_t left) {
  using Code = typename Codec::Code;
  if constexpr (Codec::kCodeBits >= 8) {
    store_pack(reinterpret_cast<Code*>(codes) + i, pack, left, true);
  } else {
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < kPack; ++k) bits |= unsigned{pack.v[k]} << (k * Codec::kCodeBits);
    if constexpr (Codec::kCodeBits == 4) {
      *reinterpret_cast<uint16_t*>(codes + i / 2) = static_cast<uint16_t>(bits);
    } else {
      const unsigned next = __shfl_down_sync(0xffffffffu, bits, 1);
      if (i % 8 == 0) codes[i / 8] = static_cast<uint8_t>(bits | next << 4);
    }
  }
}

}  // namespace
}  // namespace gossamer::device
