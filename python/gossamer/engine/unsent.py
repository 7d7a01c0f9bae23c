"""Error feedback: the memory of what a codec has left out of a bucket's messages, which the next message brings.

It is a field of the bucket, so it follows its parameters into another plan and into a checkpoint. Algorithms in Python
use it; csrc/engine/work.cpp does the same for native works.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from gossamer import _C
from gossamer.codec import Codec, accumulate_dtype


class Unsent:
    """The error feedback of one bucket.

    Args:
        kept: whether there is error feedback. False: what a codec leaves out is lost.
    """

    FIELD = "error"

    def __init__(self, bucket: _C.Bucket, *, kept: bool = True) -> None:
        self._bucket, self._kept = bucket, kept

    @classmethod
    def by(cls, codec: Codec | None, bucket: _C.Bucket) -> "Unsent":
        """Return the error feedback of a bucket that travels by `codec`: kept if the codec feeds its errors back."""
        return cls(bucket, kept=codec is not None and codec.feeds_back)

    def prepare(self) -> None:
        """Make the memory, filled with zeros, if there is none yet. Call it in an algorithm's setup()."""
        if self._kept:
            self._bucket.add_field(self.FIELD, dtype=accumulate_dtype(self._bucket.dtype))

    @contextlib.contextmanager
    def joining(self, field: str) -> Iterator[Tensor | None]:
        """Surround the message that sends `field`. Yields the error [numel] that joins it, or None if none is kept.

        The message changes the error in place. The error of a parameter without a gradient on this rank waits for a
        later step: if no rank has a gradient, no optimizer sees what is sent of that parameter.
        """
        self._bucket.clear_padding(field)  # a codec has written there, also NaN from a block with a NaN
        if not self._kept:
            yield None
            return
        self._bucket.clear_padding(self.FIELD)
        aside = self._bucket.set_aside(self.FIELD) if field == "grad" else []
        try:
            yield self._bucket.flat(self.FIELD)
        finally:
            for view, kept in aside:
                view.add_(kept)
