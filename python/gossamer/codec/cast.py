"""Codecs without statistics: Identity sends the tensor's own bytes, BF16 and FP16 send it rounded.

Identity makes the two-shot all-reduce exact and deterministic; BF16 and FP16 halve the bytes of float32.
"""

from gossamer.codec.base import NativeCodec


class Identity(NativeCodec):
    """The tensor's own bytes: nothing is lost beyond the tensor's dtype."""

    kind = "identity"


class BF16(NativeCodec):
    """bfloat16, rounded to nearest even. 2 bytes an element, float32's range, 8 bits of precision."""

    kind = "bf16"


class FP16(NativeCodec):
    """float16, rounded to nearest even. 2 bytes an element; above 65504 it becomes Inf, below 3e-8 zero."""

    kind = "fp16"
