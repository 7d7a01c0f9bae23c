"""Codecs turn rows of floats into rows of wire bytes, and back. Start with `Int8`. See docs/codecs.md.

A new codec is one file, and one line in the table here.
"""

from gossamer._ops import accumulate_dtype
from gossamer.codec.adaptive import Adaptive
from gossamer.codec.base import Codec, CodecFacts, CodecSpeed, NativeCodec, settings_text
from gossamer.codec.cast import BF16, FP16, Identity
from gossamer.codec.chunk_topk import ChunkTopK
from gossamer.codec.delta import Delta
from gossamer.codec.feedback import ErrorFeedback
from gossamer.codec.int2 import Int2
from gossamer.codec.int4 import Int4
from gossamer.codec.int8 import Int8
from gossamer.codec.minmax_u8 import MinMaxUInt8
from gossamer.codec.onebit import OneBit
from gossamer.codec.topk import TopK

CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (
        Identity,
        FP16,
        BF16,
        Int8,
        MinMaxUInt8,
        Int4,
        Int2,
        OneBit,
        TopK,
        ChunkTopK,
    )
}
"""The codecs, by the names that the benchmarks take."""

__all__ = ["CODECS", "Adaptive", "Codec", "CodecFacts", "CodecSpeed", "Delta", "ErrorFeedback", "NativeCodec"]
__all__ += ["BF16", "FP16", "ChunkTopK", "Identity", "Int2", "Int4", "Int8", "MinMaxUInt8", "OneBit", "TopK"]
__all__ += ["accumulate_dtype", "settings_text"]
