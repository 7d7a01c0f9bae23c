"""Local SGD: ranks train alone for some steps, then take the mean of their weights; DiLoCo with an outer optimizer.

Stich 2018, arXiv:1805.09767; DiLoCo: Douillard et al. 2023, arXiv:2311.08105; its streaming form: Douillard et al.
2025, arXiv:2501.18512. Between synchronisations ranks hold different weights: model.consensus() averages them exactly.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer import _C
from gossamer.algorithms.base import Algorithm, require_codec, whole_chunks
from gossamer.codec import Codec, ErrorFeedback, Identity, Int4
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.engine import Background, Unsent, Worker
from gossamer.errors import ConfigError
from gossamer.facts import APART, Messages, Method, Traffic, Trial

OuterOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
_BUCKETS_EACH = 2  # buckets of a fragment, about; each is a transfer of its own
_ALONE = "lets ranks train alone between averagings, so their weights differ until the next one"


def _outer(momentum: float) -> OuterOptimizer:
    """DiLoCo's outer optimizer."""
    return partial(torch.optim.SGD, lr=0.7, momentum=momentum, nesterov=True)


def deal(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Of each fragment the numbers of its buckets: the largest first, each to the fragment with the least so far."""
    dealt: list[list[int]] = [[] for _ in range(fragments)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        min(dealt, key=lambda own: sum(sizes[each] for each in own)).append(index)
    return [sorted(own) for own in dealt]


class LocalSGD(Algorithm):
    """Every `period` steps: anchor <- outer(anchor, mean of (anchor - x)), then x <- anchor.

    The anchor is what all ranks had after the last synchronisation. Without `outer_optimizer` it becomes the mean of x.

    Args:
        period: optimizer steps between two synchronisations of a parameter (H).
        outer_optimizer: makes an optimizer of a list of tensors; it takes the mean change as their gradient. DiLoCo's
            is functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True). Elementwise optimizers only.
        codec: what the changes travel in, such as ErrorFeedback(Int4()).
        fragments: so many parts of the model, of about equal size, take turns within a period: the same bytes in
            smaller portions. Buckets are made small enough for it.
        delay: steps that the mean may take to arrive, while training goes on; less than `period`.
        lockstep: agree on errors and skipped steps after every backward; needed with a GradScaler, whose skips would
            give ranks different numbers of steps. Otherwise ranks meet only to synchronise.
        merge: with a delay, the share of the arrived weights in (0, 1]; the rest is what the rank has by then. 1
            forgets the steps of the delay; streaming DiLoCo's is 0.5.
    """

    name = "local_sgd"
    # Trials are short, so momentum is 0.5 in them; DiLoCo's 0.9 needs more averagings.
    methods = (
        Method(
            "local_sgd",
            lambda settings: LocalSGD(settings.period),
            APART,
            _ALONE,
            "local-sgd.md",
            trial=Trial(periodic=True),
        ),
        Method(
            "diloco",
            lambda settings: LocalSGD(settings.period, _outer(0.9)),
            APART,
            f"{_ALONE}, which an outer optimizer makes",
            "local-sgd.md",
            trial=Trial(
                lambda settings: LocalSGD(settings.period, _outer(0.5), codec=ErrorFeedback(Int4())),
                periodic=True,
            ),
        ),
        Method(
            "streaming_diloco",
            lambda settings: LocalSGD(
                settings.period,
                _outer(0.9),
                codec=ErrorFeedback(Int4()),
                fragments=min(2, settings.period),
                delay=min(1, settings.period - 1),
                merge=0.5,
            ),
            APART,
            f"{_ALONE}, whose changes travel in 4 bits beside the training",
            "local-sgd.md",
            trial=Trial(
                lambda settings: LocalSGD(
                    settings.period, _outer(0.5), codec=ErrorFeedback(Int4()), fragments=2, delay=4, merge=0.5
                ),
                periodic=True,
                apart=True,
                offset=6,
            ),
        ),
    )
    fields = ("weight",)
    state_fields = ("anchor", "error", "change")
    needs_optimizer = True

    def __init__(
        self,
        period: int = 10,
        outer_optimizer: OuterOptimizer | None = None,
        *,
        codec: Codec | None = None,
        fragments: int = 1,
        delay: int = 0,
        merge: float = 1.0,
        lockstep: bool = False,
    ) -> None:
        if not isinstance(period, int) or period < 1:
            raise ConfigError(f"LocalSGD: period must be a positive number of steps, got {period!r}")
        if not isinstance(fragments, int) or not 1 <= fragments <= period:
            raise ConfigError(f"LocalSGD: fragments must be 1 to the period, {period}, got {fragments!r}")
        if not isinstance(delay, int) or not 0 <= delay < period:
            raise ConfigError(f"LocalSGD: delay must be 0 to less than the period, {period}, got {delay!r}")
        if not 0 < merge <= 1:
            raise ConfigError(f"LocalSGD: merge must be above 0 and at most 1, got {merge!r}")
        require_codec("LocalSGD", codec)
        self.period, self.outer_optimizer, self.codec = period, outer_optimizer, codec
        self.fragments, self.delay, self.merge = fragments, delay, merge
        self._lockstep = lockstep

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if name[0] != "_"}
        outer = self.outer_optimizer
        if outer is not None and hasattr(outer, "__qualname__"):  # a function's own text holds its address
            settings["outer_optimizer"] = f"{outer.__module__}.{outer.__qualname__}"
        settings["lockstep"] = self._lockstep
        return f"LocalSGD({', '.join(f'{name}={value!r}' for name, value in sorted(settings.items()))})"

    @property
    def lockstep(self) -> bool:
        return self._lockstep

    @property
    def independent(self) -> bool:
        return not self._lockstep

    def block(self) -> int:
        return self.codec.block if self.codec is not None else 1

    def alignment(self, comm: Communicator) -> int:
        return whole_chunks(comm, self.block())

    def bucket_limit(self, model_bytes: int) -> int | None:
        """So that fragments can be of about equal size."""
        return -(-model_bytes // (_BUCKETS_EACH * self.fragments)) if self.fragments > 1 else None

    def connect(self, worker: Worker) -> None:
        super().connect(worker)
        self._outer: dict[int, torch.optim.Optimizer] = {}  # by bucket: the plan of weights does not change
        self._background: Background | None = None
        self._arrivals: dict[int, int] = {}  # fragment -> the step at which its mean is taken

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        if len(buckets) < self.fragments:
            raise ConfigError(
                f"LocalSGD: {self.fragments} fragments need as many buckets, got {len(buckets)}; the model has too "
                "few parameters"
            )
        self._buckets = buckets
        self._dealt = deal([bucket.numel for bucket in buckets], self.fragments)
        self._background = self._background or Background(comm)
        for bucket in buckets:
            if "anchor" not in bucket.fields:
                anchor = bucket.add_field("anchor")
                anchor.copy_(bucket.flat("weight"))
                all_reduce(
                    anchor, op="mean", deterministic=True, group=comm
                )  # equal, whatever the ranks began with
            bucket.add_field("change", comm)
            Unsent.by(self.codec, bucket).prepare()
            if self.outer_optimizer is not None and bucket.index not in self._outer:
                self._outer[bucket.index] = self.outer_optimizer([bucket.flat("anchor")])

    def after_step(self, step: int) -> None:
        for fragment, arrival in list(self._arrivals.items()):
            if arrival == step:
                self._take(fragment)
        for fragment in range(self.fragments):
            if step % self.period == fragment * self.period // self.fragments:
                self._send(fragment, step)

    def _buckets_of(self, fragment: int) -> list[_C.Bucket]:
        return [self._buckets[index] for index in self._dealt[fragment]]

    def _send(self, fragment: int, step: int) -> None:
        assert self._background is not None
        for bucket in self._buckets_of(fragment):
            change = bucket.flat("change")
            torch.sub(bucket.flat("anchor"), bucket.flat("weight"), out=change)
            what = f"step {step} {bucket!r}: {self!r}"
            self._background.submit(partial(self._mean_change, bucket, step), what)
        self._arrivals[fragment] = step + self.delay
        if self.delay == 0:
            self._take(fragment)

    def _mean_change(self, bucket: _C.Bucket, step: int) -> None:
        assert self._background is not None
        comm = self._background.comm
        self.reduce_field(bucket, "change", codec=self.codec, deterministic=True, step=step, group=comm)

    def _take(self, fragment: int) -> None:
        assert self._background is not None
        self._background.wait()
        del self._arrivals[fragment]
        for bucket in self._buckets_of(fragment):
            anchor, change = bucket.flat("anchor"), bucket.flat("change")
            if self.outer_optimizer is None:
                anchor.sub_(change)
            else:
                anchor.grad = change
                self._outer[bucket.index].step()
                anchor.grad = None
            bucket.clear_padding("anchor")
            weight = bucket.flat("weight")
            weight.lerp_(anchor, self.merge if self.delay else 1.0)

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        codec = self.codec or Identity()
        jobs = [messages.mean(bucket, codec, passes=3) for bucket in messages.buckets]
        dealt = deal([bucket.numel for bucket in messages.buckets], self.fragments)
        return Traffic(
            in_backward=messages.finite() if self.lockstep else (),
            after=() if self.delay else jobs,
            portions=[[jobs[index] for index in own] for own in dealt] if self.delay else (),
            period=self.period,
            delay=self.delay,
            lockstep=self.lockstep,
        )

    def settle(self) -> None:
        """What is in flight is of the weights before."""
        if self._background is not None:
            self._background.wait()
        self._arrivals.clear()

    def after_consensus(self) -> None:
        """The new anchor."""
        for bucket in self._buckets:
            bucket.flat("anchor").copy_(bucket.flat("weight"))

    @property
    def bytes_sent(self) -> int:
        return self._background.comm.bytes_sent if self._background is not None else 0

    @property
    def bytes_received(self) -> int:
        return self._background.comm.bytes_received if self._background is not None else 0

    def close(self, *, crashed: bool = False) -> None:
        if self._background is not None:
            self._background.close(crashed=crashed)

    def state_dict(self) -> dict[str, Any]:
        if self._background is not None:
            self._background.wait()
        outer = {index: copy.deepcopy(optimizer.state_dict()) for index, optimizer in self._outer.items()}
        return {"arrivals": dict(self._arrivals), "outer": outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._arrivals = dict(state["arrivals"])
        for index, outer in state["outer"].items():
            self._outer[index].load_state_dict(outer)
