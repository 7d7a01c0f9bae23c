"""Int8: symmetric 8-bit integers with one bfloat16 number for each block. ByteGrad's default codec.

The arithmetic is csrc/codec/int8.h, for CPU and CUDA alike.
"""

from typing import ClassVar

from gossamer.codec.base import CodecFacts, CodecSpeed, NativeCodec, check_block


class Int8(NativeCodec):
    """Symmetric int8 in blocks of `block` elements: scale = bfloat16(largest magnitude) / 127, code = rint(x / scale).

    It takes 1 + 2 / block bytes an element (0.258 of float32 at 64). The error of an element is at most half a scale,
    so at most 1 / 253 of the largest magnitude in its block. Zeros stay zero, and magnitudes from 1e-38 to 3e38
    survive. A block with NaN or Inf decodes to NaN; other blocks do not change.

    Args:
        block: the number of elements that share a scale, a positive multiple of 32.
        stochastic: round up or down by random numbers, so that the mean over many calls is x itself. The error of one
            call is at most a scale. NativeCodec.encode says what the numbers depend on.
        seed: the seed of those numbers, 0 ... 2^64 - 1, equal on all ranks. Ranks still draw different numbers.

    Raises:
        CodecError: the block or the seed is another.
    """

    name = "int8"
    kind = 3
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(20e9, 35e9, 40e9),
        error=0.00596,
        loses="at most 1/253 of the largest magnitude in a block",
        stochastic=True,
    )

    def __init__(self, block: int = 64, stochastic: bool = False, seed: int = 0) -> None:
        self.block: int = check_block("Int8", block, 32)
        self._round_by(stochastic, seed)
