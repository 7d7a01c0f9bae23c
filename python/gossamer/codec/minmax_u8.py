"""MinMaxUInt8: Bagua's 8-bit codec, byte for byte, kept for comparison and for Bagua's numbers.

The arithmetic is csrc/codec/minmax_u8.h. Source of the format: the `bagua` project's ByteGrad.
"""

from typing import ClassVar

from gossamer.codec.base import CodecFacts, CodecSpeed, NativeCodec


class MinMaxUInt8(NativeCodec):
    """One (min, max) for the whole row, and 8-bit codes on a grid that holds zero.

    A row is a 32-byte header (min, max in the tensor's dtype) and one byte an element, padded to 32. The format is
    Bagua's, but codes are clamped at 0 where Bagua's wrap around. One outlier costs the whole row its precision, and
    ranges below about 1e-7 collapse: use Int8 unless you need Bagua's numbers. A row with NaN or Inf decodes to NaN.
    """

    name = "minmax_u8"
    kind = 4
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(25e9, 40e9, 40e9), error=0.0107, loses="about 1/510 of the range of a whole chunk"
    )
