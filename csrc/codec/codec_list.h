// Every codec, one line each: the enumerator of codec::Kind and the struct template with its arithmetic.
// To add a codec: its header, its line here, its enumerator in codec.h, its number in _ops.py, a Python face.
// Included by codec.cpp, cpu_driver.inl and codec_cuda.cu, which expand the list into their dispatch.
#pragma once

#include "codec/cast.h"
#include "codec/identity.h"
#include "codec/int4.h"
#include "codec/int8.h"
#include "codec/minmax_u8.h"
#include "codec/onebit.h"

#define GOSSAMER_CODECS(CODEC) \
  CODEC(identity, Identity)    \
  CODEC(bf16, CastBf16)        \
  CODEC(fp16, CastFp16)        \
  CODEC(int8, Int8)            \
  CODEC(minmax_u8, MinMaxU8)   \
  CODEC(int4, Int4)            \
  CODEC(onebit, OneBit)

// Calls body(Codec{}) for the codec and element type that `spec` names. Does nothing for an unknown one, which row_bytes
// refuses before.
#define GOSSAMER_CASE_CODEC(kind_, Codec)             \
  case codec::Kind::kind_:                            \
    switch (spec.dtype) {                             \
      case Dtype::f32: return body(Codec<float>{});   \
      case Dtype::f64: return body(Codec<double>{});  \
      case Dtype::f16: return body(Codec<Half>{});    \
      case Dtype::bf16: return body(Codec<Bfloat>{}); \
    }                                                 \
    break;
