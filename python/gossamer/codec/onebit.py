"""OneBit: the sign of each element, and one bfloat16 scale for each block, which is its mean magnitude.

The arithmetic is csrc/codec/onebit.h, for CPU and CUDA alike. Source: scaled sign compression, as in 1-bit SGD
(Seide et al. 2014) and EF-SGD (Karimireddy et al. 2019).
"""

from typing import ClassVar

from gossamer.codec.base import CodecFacts, CodecSpeed, NativeCodec, check_block


class OneBit(NativeCodec):
    """1 bit an element: x ~ scale if x >= 0 else -scale, scale = the mean of |x| over its block.

    It takes 1/8 + 2 / block bytes an element (0.035 of float32 at 128). An element's error can be larger than the
    element, so training stalls without ErrorFeedback. A block of zeros stays zero; a zero among other values becomes
    scale. A block with NaN or Inf decodes to NaN; other blocks do not change.

    Args:
        block: the number of elements that share a scale, a positive multiple of 128.

    Raises:
        CodecError: the block is another.
    """

    name = "onebit"
    kind = 6
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(18e9, 50e9, 50e9),
        error=0.601,
        loses="everything but the signs and the mean magnitude of each block",
        needs_feedback=True,
    )

    def __init__(self, block: int = 128) -> None:
        self.block: int = check_block("OneBit", block, 128)
