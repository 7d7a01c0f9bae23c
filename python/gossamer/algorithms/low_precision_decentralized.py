"""Decentralized averaging in 8 bits or fewer: ranks send their neighbours the compressed change of their weights.

It is difference compression as in Bagua (DCD-PSGD: Tang et al. 2018, arXiv:1803.06443), with the consensus step size of
CHOCO-SGD (Koloskova et al. 2019, arXiv:1902.00340). Ranks hold different weights: model.consensus() averages them
exactly.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from gossamer import _C
from gossamer.algorithms.base import Algorithm, require_codec, require_steps, swap_with_peers
from gossamer.codec import Codec, Int8
from gossamer.comm import Communicator
from gossamer.engine import Merge
from gossamer.errors import ConfigError
from gossamer.facts import APART, Job, Messages, Method, PlannedBucket, Traffic, Trial
from gossamer.topology import Mixing, Topology, resolve


class LowPrecisionDecentralized(Algorithm):
    """x <- x^ + Q(y + gamma * sum of w_j (x^_j - x^) - x^), where y is x after the optimizer's own update.

    x^ is what the neighbours know of this rank's weights, and equals them after each exchange. x^_j is the same of
    neighbour j. A rank keeps x^ and one x^_j for each neighbour. A rank and its neighbours add the same decoded bytes
    to its x^, so all copies have equal bits. The exchange comes after the optimizer step and overlaps with nothing.

    Args:
        codec: Q. None: Int8(). Bagua's codec is MinMaxUInt8().
        topology: a graph that does not change, with the weights w: a Topology, or its name.
        gamma: the consensus step size, in (0, 1]. Codecs of few bits need less than 1.
        interval: optimizer steps from one exchange to the next. The first step exchanges.
    """

    name = "low_precision_decentralized"
    methods: ClassVar[tuple[Method, ...]] = (
        Method(
            "low_precision_decentralized",
            lambda _: LowPrecisionDecentralized(),
            APART,
            "averages weights with a few peers instead of gradients with all, so ranks hold different weights, and "
            "sends them in 8 bits",
            "low-precision-decentralized.md",
            trial=Trial(apart=True),
        ),
    )
    fields: ClassVar[tuple[str, ...]] = ("weight",)
    state_fields: ClassVar[dict[str, Merge]] = dict.fromkeys(
        ("replica", "replica_0", "replica_1"), Merge.ANEW
    )
    needs_optimizer = True

    def __init__(
        self,
        codec: Codec | None = None,
        topology: str | Topology = "ring",
        *,
        gamma: float = 1.0,
        interval: int = 1,
    ) -> None:
        where = "LowPrecisionDecentralized"
        require_codec(where, codec)
        if getattr(codec, "stochastic", False) or (codec is not None and codec.feeds_back):
            raise ConfigError(
                f"{where}: the codec must round to nearest and have no error feedback, because what one difference "
                f"leaves out is part of the next, got {codec!r}"
            )
        require_steps(where, interval=interval)
        if not 0 < gamma <= 1:
            raise ConfigError(f"{where}: gamma must be above 0 and at most 1, got {gamma!r}")
        self.codec: Codec = codec if codec is not None else Int8()
        self.topology: Topology = resolve(topology)
        self.gamma: float = gamma
        self.interval: int = interval

    def block(self) -> int:
        return self.codec.block

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        if self.topology.uniform or self.topology.period(comm.size) != 1:
            raise ConfigError(
                f"{type(self).__name__}: the topology must be a graph that stays as it is, because a copy of each "
                f"neighbour's weights is kept, got {self.topology!r}"
            )
        self._comm, self._buckets = comm, buckets
        self._mixing = self.topology.mixing(0, comm.size, comm.rank)
        if len(self._mixing.exchanges) > 2:
            raise ConfigError(
                f"{type(self).__name__}: the topology must give a rank two neighbours at most, got "
                f"{len(self._mixing.exchanges)} by {self.topology!r}"
            )
        for bucket in buckets:
            if "replica" not in bucket.fields:
                self._seed(bucket)

    def _seed(self, bucket: _C.Bucket) -> None:
        """Takes exact copies of the neighbours' weights. If restored, all ranks average theirs afterwards."""
        bucket.add_field("replica").copy_(bucket.flat("weight"))
        for number, exchange in enumerate(self._mixing.exchanges):
            copy = bucket.add_field(f"replica_{number}").copy_(bucket.flat("replica"))
            if not self._restored:
                self._comm.exchange(copy, bucket.flat("replica"), exchange.to, exchange.source).wait()

    def after_step(self, step: int) -> None:
        if (step - 1) % self.interval or self._comm.size == 1 or self.alone:
            return
        for bucket in self._buckets:
            self.submit(bucket, self._exchange)
        self.wait()

    def _exchange(self, bucket: _C.Bucket) -> None:
        names = [f"replica_{number}" for number in range(len(self._mixing.exchanges))]
        exchange_differences(
            self._comm,
            self.codec,
            self._mixing,
            bucket.flat("weight"),
            bucket.flat("replica"),
            [bucket.flat(name) for name in names],
            gamma=self.gamma,
        )
        for name in ("weight", "replica", *names):
            bucket.clear_padding(name)

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        jobs = [self._differences(bucket, messages) for bucket in messages.buckets]
        return Traffic(in_backward=messages.finite(), after=jobs, period=self.interval)

    def _differences(self, bucket: PlannedBucket, messages: Messages) -> Job:
        wire = self.codec.wire_bytes(bucket.numel, bucket.dtype)
        cost, sent = messages.exchange(wire, self.topology)
        speed = messages.speed_of(self.codec)
        cpu_s = 4 * bucket.numel * (1 / speed.encode + (1 + sent) / speed.decode)
        return Job(cost, cpu_s + messages.pass_s((3 + 3 * sent) * bucket.nbytes))

    def after_consensus(self) -> None:
        """Sets every copy to this rank's weights, because all ranks hold equal weights now."""
        for bucket in self._buckets:
            for field in set(self.state_fields) & set(bucket.fields):
                bucket.flat(field).copy_(bucket.flat("weight"))

    def after_merge(self) -> None:
        self.after_consensus()

    # --- in a run whose group changes ---

    def why_not_elastic(self) -> str:
        return ""


def exchange_differences(
    comm: Communicator,
    codec: Codec,
    mixing: Mixing,
    x: Tensor,
    own: Tensor,
    others: Sequence[Tensor],
    *,
    gamma: float = 1.0,
) -> None:
    """Makes one exchange, in place: x = own += Q(x + gamma * sum of w_j (others_j - own) - own). Collective.

    Each of `others` changes by what its rank sends.

    Args:
        x: this rank's weights [numel], after the optimizer's update.
        own: what the neighbours know of this rank's weights [numel]. Each has an equal copy among its `others`.
        others: for each of mixing.exchanges, what this rank knows of its source's weights [numel].
    """
    difference = x - own
    for other, exchange in zip(others, mixing.exchanges, strict=True):
        difference.add_(other - own, alpha=gamma * exchange.weight)
    wire = codec.encode(difference.view(1, -1))
    received, sent = swap_with_peers(comm, mixing, wire)
    own.add_(_decoded(codec, wire, difference))
    x.copy_(own)
    sent.wait()
    for change, other in zip(received, others, strict=True):
        other.add_(_decoded(codec, change, difference))


def _decoded(codec: Codec, wire: Tensor, out: Tensor) -> Tensor:
    return codec.decode(wire, out.view(1, -1)).view(-1)
