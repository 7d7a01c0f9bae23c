"""Synchronous data parallelism: every rank steps with the same averaged gradient. What torch DDP does.

Three ways to average: the group's own all-reduce, the deterministic two-shot, or a two-shot through a codec
(ByteGrad is that with an 8-bit codec).
"""

from typing import Any

import torch

from gossamer import _C
from gossamer.algorithms.base import Algorithm
from gossamer.codec import Codec, ErrorFeedback, Identity
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.errors import ConfigError


class GradientAllReduce(Algorithm):
    """g <- mean (or sum) of g over the ranks, in place, before the optimizer steps.

    Args:
        deterministic: sum in rank order in float32 (float64 for float64), so that the bits depend neither on
            bucket sizes nor on the backend. The bytes of a ring, in two hops.
        average: the mean, or the sum. With the sum, accumulate under no_sync(): a second synchronised backward
            would add up what has been summed already.
        codec: what travels; a codec's sums are in rank order too. None sends the gradient's own dtype.
    """

    name = "gradient_allreduce"
    state_fields = ("error",)

    def __init__(self, deterministic: bool = False, average: bool = True, codec: Codec | None = None) -> None:
        if codec is not None and not isinstance(codec, Codec):
            raise ConfigError(f"{type(self).__name__}: codec must be a Codec or None, got {codec!r}")
        self.deterministic, self.average = deterministic, average
        self.codec = codec if codec is not None or not deterministic else Identity()
        self._comm: Communicator | None = None

    def block(self) -> int:
        """The codec's: no block holds two parameters, so the result does not depend on the bucket plan."""
        return self.codec.block if self.codec is not None else 1

    def alignment(self, comm: Communicator) -> int:
        """Whole blocks for every rank's chunk; 8 elements, a whole wire row, where there are no blocks."""
        return comm.size * max(self.block(), 8)

    def setup(self, comm: Communicator, buckets: list[Any]) -> None:
        self._comm = comm
        for bucket in buckets:
            if isinstance(self.codec, ErrorFeedback):
                bucket.add_field(
                    "error", dtype=torch.float64 if bucket.dtype == torch.float64 else torch.float32
                )

    def native_work(self, bucket: Any) -> "_C.BucketWork | None":
        if self.codec is None:
            return _C.NativeAllReduce(self.average)
        if self.codec.native is not None:
            return _C.CodecAllReduce(self.codec.native, self.average)
        return None

    def bucket_ready(self, bucket: Any) -> None:
        all_reduce(
            bucket.flat(),
            codec=self.codec,
            op="mean" if self.average else "sum",
            error=bucket.flat("error") if isinstance(self.codec, ErrorFeedback) else None,
            group=self._comm,
        )
