"""Synchronous data parallelism, as in torch DDP: every rank steps with the same averaged gradient.

There are three ways to average: the group's own all-reduce, the deterministic two-shot, and a two-shot through a codec.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from gossamer import _C
from gossamer.algorithms.base import Algorithm, whole_chunks
from gossamer.codec import BF16, FP16, Adaptive, Codec, ErrorFeedback, Identity, Int4, Int8, OneBit
from gossamer.comm import Communicator
from gossamer.engine import Merge, Unsent, Worker
from gossamer.errors import ConfigError
from gossamer.facts import COMPRESSED, EXACT, ROUNDED, Messages, Method, Settings, Traffic, Trial

_SENDS = "sends gradients in {} bits and adds what that leaves out to the next step's"


def _method(
    name: str,
    kind: str,
    changes: str,
    codec: Codec | None = None,
    *,
    deterministic: bool = False,
    advised: bool = True,
    trial: bool = True,
    hook: bool = True,
) -> Method:
    def make(_: Settings) -> Algorithm:
        return GradientAllReduce(deterministic, codec=codec)

    return Method(
        name,
        make,
        kind,
        changes,
        "algorithms.md",
        advised=advised,
        trial=Trial() if trial else None,
        hook=hook,
    )


class GradientAllReduce(Algorithm):
    """g <- mean (or sum) of g over the ranks, in place, before the optimizer steps.

    Args:
        deterministic: sum in rank order in float32 (float64 for float64), so that the bits depend neither on bucket
            sizes nor on the backend. It sends the bytes of a ring, in two hops.
        average: whether to take the mean. False: the sum. Accumulate sums under no_sync(), because a second
            synchronised backward would sum over the ranks again what is already a sum.
        codec: the codec of the gradients, whose sums are in rank order too. None sends the gradients' own dtype. An
            Adaptive chooses a codec for each parameter.
    """

    name = "gradient_allreduce"
    methods: ClassVar[tuple[Method, ...]] = (
        _method("gradient_allreduce", EXACT, "computes what torch DDP does", hook=False),
        # Not advised: it is chosen for equal bits, not for speed.
        _method("deterministic", EXACT, "sums in the order of the ranks", deterministic=True, advised=False),
        _method("bf16", ROUNDED, "rounds each gradient to bfloat16 twice", BF16(), trial=False),
        _method("fp16", ROUNDED, "rounds each gradient to float16 twice", FP16()),
        _method("int8", COMPRESSED, _SENDS.format(8), ErrorFeedback(Int8()), trial=False),
        _method("int4", COMPRESSED, _SENDS.format(4), ErrorFeedback(Int4())),
        _method(
            "onebit",
            COMPRESSED,
            "sends the signs of gradients and feeds back what that leaves out, which slows the training per step",
            ErrorFeedback(OneBit()),
        ),
    )
    state_fields: ClassVar[dict[str, Merge]] = {"error": Merge.OWED}
    uneven_inputs = True
    weighs_gradients = True

    def __init__(
        self, deterministic: bool = False, average: bool = True, codec: Codec | Adaptive | None = None
    ) -> None:
        if codec is not None and not isinstance(codec, (Codec, Adaptive)):
            raise ConfigError(
                f"{type(self).__name__}: codec must be a Codec, an Adaptive or None, got {codec!r}"
            )
        self.deterministic: bool = deterministic
        self.average: bool = average
        self.codec: Codec | Adaptive | None = codec if codec is not None or not deterministic else Identity()
        self._comm: Communicator | None = None
        self._tuned: dict[str, Codec | None] = {}

    def connect(self, worker: Worker) -> None:
        super().connect(worker)
        self._tuned = {}

    def block(self) -> int:
        """The codecs' block. No block holds two parameters, so the result does not depend on the bucket plan."""
        codecs = [codec for codec in [self.codec, *self._tuned.values()] if codec is not None]
        return math.lcm(*(codec.block for codec in codecs))

    def alignment(self, comm: Communicator) -> int:
        return whole_chunks(comm, self.block(), None if self._tuned else self.codec)

    def group_of(self, name: str, param: torch.Tensor) -> Codec | None:
        return self._choose(name, param)

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        self._comm = comm
        for bucket in buckets:
            Unsent.by(self.codec_of(bucket), bucket).prepare()

    def native_work(self, bucket: _C.Bucket) -> _C.BucketWork | None:
        codec = self.codec_of(bucket)
        if codec is None:
            return _C.NativeAllReduce(self.average)
        if codec.native is not None:
            return _C.CodecAllReduce(codec.native, self.average)
        return None

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        op = "mean" if self.average else "sum"
        self.reduce_field(
            bucket, "grad", codec=self.codec_of(bucket), op=op, step=bucket.step, group=self._comm
        )

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        return Traffic(
            in_backward=[
                messages.mean(bucket, self._choose(*messages.parameter(bucket))).after(bucket.done)
                for bucket in messages.buckets
            ]
        )

    def for_any_buckets(self) -> "GradientAllReduce":
        return GradientAllReduce(deterministic=True, average=self.average, codec=self.codec)

    def codec_choices(self, extra: Sequence[Codec | None]) -> list[Codec | None]:
        """Exact sending and `extra`. None for deterministic sums, whose bits must not depend on measurements."""
        if self.deterministic:
            return super().codec_choices(extra)
        for codec in extra:
            if codec is not None and codec.feeds_back:
                raise ConfigError(
                    f"autotune: codecs must be given without error feedback, got {codec!r}; with every codec "
                    f"errors are fed back where the algorithm's own does so"
                )
        own = self.codec.codecs if isinstance(self.codec, Adaptive) else [self.codec]
        used = {repr(codec.plain if codec is not None else None) for codec in own}
        choices = {repr(codec): codec for codec in [None, *extra]}
        return [codec for name, codec in choices.items() if {name} != used]

    def use_codecs(self, codecs: Mapping[str, Codec | None]) -> None:
        self._tuned = dict(codecs)

    def _choose(self, name: str, param: torch.Tensor) -> Codec | None:
        if not isinstance(self.codec, Adaptive):
            return self.codec
        exact = Identity() if self.deterministic else None
        return self.codec.choose(name, param) or exact

    def codec_of(self, bucket: _C.Bucket) -> Codec | None:
        own = self._choose(bucket.names[0], bucket.params[0])
        if any(name not in self._tuned for name in bucket.names):
            return own
        codec = self._tuned[bucket.names[0]]
        if own is not None and own.feeds_back:  # the errors of the codec before must still be sent
            return ErrorFeedback(codec or Identity())
        if codec is None and own is not None and bucket.dtype.itemsize == 2:
            return Identity()  # sums in float32, as codecs do; the backend's all-reduce may sum in 16 bits
        return codec
