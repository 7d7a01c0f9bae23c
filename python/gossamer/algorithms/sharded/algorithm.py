"""ZeRO-1: each rank keeps the optimizer's state of its share of the weights, and steps that share alone.

The method is that of Rajbhandari et al. 2020 (arXiv:1910.02054), stage 1. Gradients are reduce-scattered, through a
codec if one is given; then each rank steps its share, and the changes of the weights are gathered, through another
codec with error feedback. So all ranks hold equal weights, and send what a compressed all-reduce would send.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer import _C
from gossamer.algorithms.base import Algorithm, require_codec, require_in_optimizer
from gossamer.algorithms.sharded.optimizer import ShardedOptimizer
from gossamer.algorithms.sharded.pieces import Share
from gossamer.codec import Codec, Identity, Int8
from gossamer.collectives import all_gather, all_reduce, reduce_scatter
from gossamer.comm import Communicator
from gossamer.errors import ConfigError
from gossamer.facts import EXACT, ROUNDED, Job, Messages, Method, Traffic, Trial
from gossamer.topology import ShiftOne


class Sharded(Algorithm):
    """ZeRO-1: a rank steps its share of the weights, so it keeps 1/n of the optimizer's state.

    After backward, the gradients of this rank's share are in the optimizer's pieces. param.grad of the model is NaN:
    no rank holds the mean of all gradients. DataParallel's optimizer must be one ShardedOptimizer.

    Args:
        codec: of the gradients, whose sums are in rank order. None: exact.
        gather_codec: of the changes of the weights. What it leaves out is sent with the next step's. None: exact.
        holders: the number of ranks, at least 1, that keep the optimizer's state of each share, and step it. gs.elastic
            needs 2 or more: if fewer ranks die at once, the others have all of the state.
    """

    name = "sharded"
    methods: ClassVar[tuple[Method, ...]] = (
        Method(
            "sharded",
            lambda _: Sharded(),
            EXACT,
            "keeps 1/n of the optimizer's state",
            "sharded.md",
            trial=Trial(),
        ),
        Method(
            "sharded_int8",
            lambda _: Sharded(Int8(), Int8()),
            ROUNDED,
            "keeps 1/n of the optimizer's state, and sends gradients and changes of weights in 8 bits",
            "sharded.md",
            trial=Trial(),
        ),
    )
    fields: ClassVar[tuple[str, ...]] = ("grad", "weight")
    needs_optimizer = True
    optimizer_class = ShardedOptimizer

    _optimizer: ShardedOptimizer

    def __init__(
        self, codec: Codec | None = None, gather_codec: Codec | None = None, *, holders: int = 1
    ) -> None:
        if not isinstance(holders, int) or isinstance(holders, bool) or holders < 1:
            raise ConfigError(f"Sharded: holders must be a number of ranks of at least 1, got {holders!r}")
        for each in (codec, gather_codec):
            require_codec("Sharded", each)
            if each is not None and (each.feeds_back or each.gathers):
                raise ConfigError(
                    f"Sharded: a codec must have neither error feedback, which the weights have anyway, nor send whole "
                    f"rows, got {each!r}"
                )
        self.codec, self.gather_codec = codec, gather_codec
        self.holders: int = holders
        self._shares: dict[int, list[Share]] = {}  # by bucket, this rank's own one first
        self._awaits_shares = False  # in a new group, until go_on() or divide_anew()

    @property
    def own_weights(self) -> bool:
        return False  # they are equal

    @classmethod
    def make_optimizer(
        cls, params: Iterable[Tensor], *, lr: float, warmup_steps: int
    ) -> torch.optim.Optimizer:
        return ShardedOptimizer(torch.optim.AdamW, params, lr=lr)

    def use_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().use_optimizers(optimizers)
        assert isinstance(optimizers[0], ShardedOptimizer)
        self._optimizer = optimizers[0]

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        def half(bucket: Any, codec: Codec | None) -> Job:
            job = messages.mean(bucket, codec or Identity())  # a reduce-scatter and an all-gather
            return Job(job.cost.times(0.5), job.cpu_s / 2, job.done, job.beside_s / 2, job.inside / 2)

        finite = messages.finite()
        sums = [half(bucket, self.codec).after(bucket.done) for bucket in messages.buckets]
        for index, bucket in enumerate(messages.buckets):
            cost, _ = messages.exchange(bucket.nbytes // messages.ranks, ShiftOne())
            sums[index] += Job(cost.times(min(self.holders, messages.ranks) - 1))
        return Traffic(
            in_backward=[job + agreed for job, agreed in zip(sums, finite, strict=True)],
            after=[half(bucket, self.gather_codec) for bucket in messages.buckets],
        )

    def block(self) -> int:
        return math.lcm(*(codec.block for codec in (self.codec, self.gather_codec) if codec is not None))

    def alignment(self, comm: Communicator) -> int:
        return comm.size * math.lcm(self.block(), 8)

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        require_in_optimizer("Sharded", buckets, set(self._optimizer._params))
        self._comm, self._buckets = comm, buckets
        self._awaits_shares |= self._restored
        if not self._awaits_shares:
            self._optimizer._divide(*self._make_shares(), comm)

    def _make_shares(self) -> tuple[list[Share], list[Share]]:
        """Make this rank's own shares, and those that it keeps beside others."""
        comm = self._comm
        # A host that is lost takes all of its ranks along, so the next holder of a share is on another host.
        hosts = comm.hosts if isinstance(comm, _C.ByHosts) else []
        of_rank = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}

        def on_one_host(behind: int) -> int:
            """Count the ranks that have no other host so far behind them."""
            pairs = ((rank, (rank - behind) % comm.size) for rank in range(comm.size))
            return sum(bool(hosts) and of_rank[one] == of_rank[other] for one, other in pairs)

        behind = sorted(range(1, comm.size), key=lambda each: (on_one_host(each), each))
        self._behind = [0, *behind][: self.holders]
        ranks = [(comm.rank - behind) % comm.size for behind in self._behind]
        self._shares = {
            bucket.index: [self._share_of(bucket, rank) for rank in ranks] for bucket in self._buckets
        }
        own = [shares[0] for shares in self._shares.values()]
        return own, [copy for shares in self._shares.values() for copy in shares[1:]]

    def _share_of(self, bucket: _C.Bucket, rank: int) -> Share:
        numel = bucket.numel // self._comm.size
        gradient = torch.zeros(numel, dtype=bucket.dtype, device=bucket.device)
        unsent = torch.zeros_like(gradient) if self.gather_codec is not None else None
        return Share(bucket, rank * numel, (rank + 1) * numel, gradient, unsent)

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        flat = bucket.flat()
        bucket.clear_padding("grad")
        codec, nonce = self.codec or Identity(), bucket.step * 2**20 + bucket.index
        if self.alone:
            all_reduce(flat, codec=codec, op="mean", nonce=nonce, group=self._comm)
            flat.add_(torch.where(torch.isfinite(flat).all(), 0.0, torch.nan))
            self._optimizer._take_gradients(bucket)
        else:
            own, *copies = self._shares[bucket.index]
            reduce_scatter(flat, codec=codec, op="mean", nonce=nonce, group=self._comm, out=own.gradient)
            # A GradScaler skips a step on all ranks or on none.
            infinite = (~torch.isfinite(own.gradient)).any().float().view(1)
            all_reduce(infinite, group=self._comm)
            own.gradient.add_(torch.where(infinite > 0, torch.nan, 0.0))
            rank, size = self._comm.rank, self._comm.size
            for behind, copy in zip(self._behind[1:], copies, strict=True):
                to, source = (rank + behind) % size, (rank - behind) % size
                self._comm.exchange(copy.gradient, own.gradient, to, source).wait()
            for piece in (piece for share in (own, *copies) for piece in share.pieces):
                piece.leaf.grad = piece.gradient
        if self._survives and bucket.index == self._buckets[-1].index:
            # If this backward ends well on any rank, all ranks have had their gradients, also if the group fails now.
            all_reduce(torch.zeros(1, device=bucket.device), group=self._comm)
        flat.fill_(torch.nan)  # whoever takes it for the mean shall notice
        bucket.clear_padding("grad")

    def before_step(self, step: int) -> None:
        self._optimizer._begin_step(alone=self.alone)
        for share in self._every_share():
            if share.unsent is not None:
                share.before = share.weights.clone()
                share.weights.add_(share.unsent)

    def after_step(self, step: int) -> None:
        for bucket in self._buckets if not self.alone else ():
            self.submit(bucket, self._gather)
        self.wait()

    def _gather(self, bucket: _C.Bucket) -> None:
        flat, shares = bucket.flat("weight"), self._shares[bucket.index]
        own = shares[0]
        if self.gather_codec is None or own.before is None:
            for share in shares if self._survives else ():
                share.stepped = share.weights.clone()
            all_gather(own.weights, group=self._comm, out=flat)
            for share in shares:
                share.stepped = None
            return
        changes = [share.weights - share.before for share in shares if share.before is not None]
        nonce = self.optimizer_steps * 2**20 + bucket.index
        decoded = all_gather(changes[0], codec=self.gather_codec, nonce=nonce, group=self._comm)
        for share in shares:
            assert share.before is not None
            share.weights.copy_(share.before)
        flat.add_(decoded)
        for share, change in zip(shares, changes, strict=True):
            assert share.unsent is not None
            torch.sub(change, decoded[share.begin : share.end], out=share.unsent)
            share.unsent.nan_to_num_(0.0, 0.0, 0.0)
            share.before = None

    def _every_share(self) -> Iterator[Share]:
        return (share for shares in self._shares.values() for share in shares)

    def after_consensus(self) -> None:
        for share in self._every_share():
            if share.unsent is not None:
                share.unsent.zero_()

    # --- in a run whose group changes ---

    def why_not_elastic(self) -> str:
        if self.holders == 1:
            return (
                f"{self!r} must have holders=2 or more, because a death would lose what one rank alone keeps"
            )
        return ""

    def averages_gradients(self, step: int) -> bool:
        return False  # no rank holds the mean of all

    def heal_clips(self, heal: Callable[[], bool]) -> None:
        """Lets clip_grad_norm_() go on after an error if `heal` has joined another group, and returns True."""
        self._optimizer._heal = heal

    @property
    def clipped(self) -> tuple[int, float]:
        """How often clip_grad_norm_() has found a norm, and the last norm."""
        return self._optimizer._clipped

    def go_on(self, texts: Callable[[str], list[str]], clipped: tuple[int, float]) -> None:
        """In the next group: steps what this rank has stepped before, until divide_anew(). Collective.

        Gradients are averaged as before. Each rank steps its shares of the group before, and sends no weights.

        Args:
            texts: returns the text that every rank passes.
            clipped: the highest `clipped` of all ranks.
        """
        self._shares, self._awaits_shares, self.alone = {}, False, True
        self._optimizer._go_on(self._comm, texts, clipped)

    def divide_anew(self, texts: Callable[[str], list[str]], *, holds: bool) -> None:
        """Divides weights and state among the ranks of this group, at the same step of all. Collective.

        Args:
            texts: returns the text that every rank passes.
            holds: whether this rank has a part of them.

        Raises:
            CommError: no rank has some part.
        """
        self._awaits_shares = self.alone = False
        planned = {param for bucket in self._buckets for param in bucket.params}
        self._optimizer._divide_anew(self._make_shares, self._comm, texts, planned=planned, holds=holds)

    def leave(self) -> None:
        """Keeps the shares in the optimizer, for the next wrapper of the model."""
        self._optimizer._rest()

    def close(self, *, crashed: bool = False) -> None:
        if not self._survives:
            self._optimizer._let_go()
            return
        for share in self._every_share():  # as far as a step has come that could not be ended
            if share.stepped is not None:
                share.weights.copy_(share.stepped)
                share.stepped = None
            if share.before is not None:
                assert share.unsent is not None
                share.unsent.zero_()
                share.before = None
        self._optimizer._set_aside()
