"""Int2: two small and two large levels, and one bfloat16 scale for each block, which is its mean magnitude.

The arithmetic is csrc/codec/int2.h, for CPU and CUDA alike.
"""

from typing import ClassVar

from gossamer.codec.base import CodecFacts, CodecSpeed, NativeCodec, check_block


class Int2(NativeCodec):
    """2 bits an element: x ~ -2, -9/16, 9/16 or 2 times a scale, the mean of |x| over its block.

    It takes 1/4 + 2 / block bytes an element (0.066 of float32 at 128). Use it with ErrorFeedback, for changes of
    weights as DiLoCo sends them. A block of zeros stays zero; a zero among other values becomes 9/16 scale. A block
    with NaN or Inf decodes to NaN; other blocks do not change.

    Args:
        block: the number of elements that share a scale, a positive multiple of 128.

    Raises:
        CodecError: the block is another.
    """

    name = "int2"
    kind = 7
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(12e9, 25e9, 35e9),
        error=0.345,
        loses="all but two magnitudes, for small and for large values of a block",
        needs_feedback=True,
    )

    def __init__(self, block: int = 128) -> None:
        self.block: int = check_block("Int2", block, 128)
