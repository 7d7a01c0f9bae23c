"""Int4: 16 levels, closer together near zero, with one bfloat16 scale per block.

The arithmetic is csrc/codec/int4.h, for CPU and CUDA alike.
"""

from typing import ClassVar

from gossamer.codec.base import CodecFacts, CodecSpeed, NativeCodec, check_block


class Int4(NativeCodec):
    """4 bits an element in blocks of `block` elements: x ~ scale * k (6 + |k|), k = -8 ... 7.

    It takes 1/2 + 2 / block bytes an element (0.141 of float32 at 32). The element m of largest magnitude in a block
    gets the outermost level. The error of another element is at most 3/16 |m|, and at most 3/32 |m| unless it is an
    extreme of the opposite sign. Zeros stay zero, and magnitudes from 1e-35 to 3e38 survive. A block with NaN or Inf
    decodes to NaN; other blocks do not change.

    Args:
        block, seed: as in Int8, which also lists the errors.
        stochastic: as in Int8. The range is then symmetric, k = -7 ... 7.
    """

    name = "int4"
    kind = 5
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(11e9, 25e9, 35e9),
        error=0.0838,
        loses="at most 3/16 of the largest magnitude in a block, most often far less",
        needs_feedback=True,
        stochastic=True,
    )

    def __init__(self, block: int = 32, stochastic: bool = False, seed: int = 0) -> None:
        self.block: int = check_block("Int4", block, 32)
        self._round_by(stochastic, seed)
