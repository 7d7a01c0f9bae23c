"""Codecs without statistics: Identity sends the tensor's own bytes, BF16 and FP16 send it rounded.

Identity makes the two-shot all-reduce exact and deterministic; BF16 and FP16 halve the bytes of float32.
"""

from typing import ClassVar

from gossamer.codec.base import CodecFacts, CodecSpeed, NativeCodec


class Identity(NativeCodec):
    """The tensor's own bytes. Nothing is lost."""

    name = "identity"
    kind = 0
    facts: ClassVar[CodecFacts] = CodecFacts(CodecSpeed(10e9, 10e9, 10e9), error=0.0, loses="nothing")


class BF16(NativeCodec):
    """bfloat16, rounded to nearest even. 2 bytes an element, float32's range, 8 bits of precision."""

    name = "bf16"
    kind = 1
    facts: ClassVar[CodecFacts] = CodecFacts(CodecSpeed(20e9, 20e9, 20e9), error=0.00166, loses="precision")


class FP16(NativeCodec):
    """float16, rounded to nearest even. 2 bytes an element. Magnitudes above 65504 become Inf, below 3e-8 zero."""

    name = "fp16"
    kind = 2
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(20e9, 20e9, 20e9), error=0.000208, loses="precision and range"
    )
