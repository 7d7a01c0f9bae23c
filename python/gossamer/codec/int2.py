"""Int2: two small and two large levels, and one bfloat16 peak for each block, its largest magnitude.

The arithmetic is csrc/codec/int2.h, for CPU and CUDA alike.
"""

from typing import ClassVar

from gossamer.codec.base import CodecFacts, CodecSpeed, NativeCodec, check_block


class Int2(NativeCodec):
    """2 bits an element: x ~ -13/16, -1/4, 1/4 or 13/16 of the largest magnitude of its block, whichever is nearest.

    It takes 1/4 + 2 / block bytes an element (0.070 of float32 at 64). The error of an element is at most 9/32 of its
    block's largest magnitude. Use it with ErrorFeedback, for changes of weights as DiLoCo sends them. A block of zeros
    stays zero; a zero among other values becomes a quarter of the largest. A block with NaN or Inf decodes to NaN;
    other blocks do not change.

    Args:
        block: the number of elements that share a peak, a positive multiple of 32.

    Raises:
        CodecError: the block is another.
    """

    name = "int2"
    kind = 7
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(20e9, 25e9, 35e9),
        error=0.401,
        loses="at most 9/32 of the largest magnitude in a block",
        needs_feedback=True,
    )

    def __init__(self, block: int = 64) -> None:
        self.block: int = check_block("Int2", block, 32)
