// Every codec: one line with its number, its name and the struct template with its arithmetic. codec.cpp, cpu_driver.inl
// and cuda_launches.cuh make their dispatch from the list. To add a codec, write its header, its include and its line
// here, and a Python face whose `kind` is the number. Do not change the number of a codec. See docs/adding-a-codec.md.
#pragma once

#include "codec/cast.h"
#include "codec/codec.h"
#include "codec/identity.h"
#include "codec/int2.h"
#include "codec/int4.h"
#include "codec/int8.h"
#include "codec/minmax_u8.h"
#include "codec/onebit.h"

#define GOSSAMER_CODECS(CODEC)  \
  CODEC(0, identity, Identity)  \
  CODEC(1, bf16, CastBf16)      \
  CODEC(2, fp16, CastFp16)      \
  CODEC(3, int8, Int8)          \
  CODEC(4, minmax_u8, MinMaxU8) \
  CODEC(5, int4, Int4)          \
  CODEC(7, int2, Int2)          \
  CODEC(6, onebit, OneBit)

namespace gossamer::codec {
#define GOSSAMER_ENUMERATOR(number, name, Codec) name = number,
enum class Kind : int { GOSSAMER_CODECS(GOSSAMER_ENUMERATOR) };
#undef GOSSAMER_ENUMERATOR
}  // namespace gossamer::codec

// Calls body(Codec{}) for the codec and element type that `spec` names. Does nothing for an unknown one, which row_bytes
// refuses before.
#define GOSSAMER_CASE_CODEC(number, name, Codec)      \
  case codec::Kind::name:                             \
    switch (spec.dtype) {                             \
      case Dtype::f32: return body(Codec<float>{});   \
      case Dtype::f64: return body(Codec<double>{});  \
      case Dtype::f16: return body(Codec<Half>{});    \
      case Dtype::bf16: return body(Codec<Bfloat>{}); \
    }                                                 \
    break;
