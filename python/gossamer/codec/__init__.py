"""Codecs: rows of floats <-> rows of wire bytes. `Int8` is the one to start with; see docs/codecs.md."""

from gossamer.codec.adaptive import Adaptive
from gossamer.codec.base import Codec, NativeCodec, accumulate_dtype
from gossamer.codec.cast import BF16, FP16, Identity
from gossamer.codec.feedback import ErrorFeedback
from gossamer.codec.int4 import Int4
from gossamer.codec.int8 import Int8
from gossamer.codec.minmax_u8 import MinMaxUInt8
from gossamer.codec.onebit import OneBit
from gossamer.codec.topk import TopK

__all__ = [
    "BF16",
    "FP16",
    "Adaptive",
    "Codec",
    "ErrorFeedback",
    "Identity",
    "Int4",
    "Int8",
    "MinMaxUInt8",
    "NativeCodec",
    "OneBit",
    "TopK",
    "accumulate_dtype",
]
