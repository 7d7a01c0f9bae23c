"""What a codec has left out of a bucket's messages, and the next one brings: the memory of error feedback.

By parameter: it is a field of the bucket, so it moves with the plan and is saved. Algorithms use it; for native works
csrc/engine/work.cpp does the same.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from gossamer import _C
from gossamer.codec import Codec, accumulate_dtype


class Unsent:
    """Of one bucket.

    Args:
        kept: whether there is such memory; False leaves nothing for later.
    """

    FIELD = "error"

    def __init__(self, bucket: _C.Bucket, *, kept: bool = True) -> None:
        self._bucket, self._kept = bucket, kept

    @classmethod
    def by(cls, codec: Codec | None, bucket: _C.Bucket) -> "Unsent":
        """What that codec leaves out of the bucket: nothing that is kept, unless it feeds its errors back."""
        return cls(bucket, kept=codec is not None and codec.feeds_back)

    def prepare(self) -> None:
        """In an algorithm's setup(): makes the memory, zeros, where there is none yet."""
        if self._kept:
            self._bucket.add_field(self.FIELD, dtype=accumulate_dtype(self._bucket.dtype))

    @contextlib.contextmanager
    def joining(self, field: str) -> Iterator[Tensor | None]:
        """Around the message that sends `field`: the error that joins it [numel], changed in place, or None.

        What was left out of a parameter that this rank has no gradient for waits for the next one: if no rank has one,
        what is sent of that parameter reaches no optimizer.
        """
        self._bucket.clear_padding(
            field
        )  # which a codec has filled, with NaN where a neighbour's block had one
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
