"""Asynchronous model averaging: ranks train on their own while their weights are averaged in the background.

The algorithm is Bagua's. Ranks hold different weights: model.consensus() averages them exactly.
"""

import threading
import time
from functools import partial
from typing import ClassVar

import torch

from gossamer import _C
from gossamer.algorithms.base import Algorithm, require_steps
from gossamer.codec import Identity
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.engine import Background, Worker
from gossamer.errors import ConfigError
from gossamer.facts import APART, Job, Messages, Method, Traffic, Trial

_IDLE_S = 0.01  # between rounds in which no rank trains


class AsyncModelAverage(Algorithm):
    """x += mean(s) - s, where s is a copy of x from the beginning of the round. Steps taken meanwhile are kept.

    Each rank begins a round `sync_interval_ms` after its last one. The round ends when the slowest rank has begun it
    too; no rank's training waits. The result is added before a forward. A rank that has called abort(), or whose
    wrapper is closed or deleted, still answers the others, and the mean is that of the ranks that train.

    Args:
        sync_interval_ms: milliseconds from the end of a round to the next round.
        warmup_steps: the number of first steps, which average gradients exactly.
    """

    name = "async"
    methods: ClassVar[tuple[Method, ...]] = (
        Method(
            "async",
            lambda _: AsyncModelAverage(),
            APART,
            "averages weights in the background, whenever it can",
            "async.md",
            trial=Trial(apart=True, by_clock=True, periodic=True),
        ),
    )
    fields: ClassVar[tuple[str, ...]] = ("grad", "weight")
    needs_optimizer = True

    def __init__(self, sync_interval_ms: float = 500, warmup_steps: int = 0) -> None:
        if not sync_interval_ms >= 0:
            raise ConfigError(
                f"AsyncModelAverage: sync_interval_ms must not be negative, got {sync_interval_ms!r}"
            )
        require_steps("AsyncModelAverage", least=0, what="number of steps", warmup_steps=warmup_steps)
        self.sync_interval_ms: float = sync_interval_ms
        self.warmup_steps: int = warmup_steps

    @property
    def lockstep(self) -> bool:
        """True during the warm-up."""
        return self.optimizer_steps < self.warmup_steps

    @property
    def independent(self) -> bool:
        return True

    def connect(self, worker: Worker) -> None:
        super().connect(worker)
        self._next_at = 0.0  # when the next round may begin, by time.monotonic()
        self._training = True  # this rank's weights are part of the mean
        self._serving = False  # _serve is queued or runs
        self._closing = False
        self._lock = threading.RLock()  # guards these three; a garbage collection within it may call leave()
        self._forward_of = -1  # the step of the last forward
        self._begun: list[_C.Bucket] = []  # the buckets of a round whose result has not been added
        self._background = None

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        self._comm, self._buckets = comm, buckets
        self._background = self._background or Background(comm)
        for bucket in buckets:
            bucket.add_field("mean")
            bucket.add_field("snapshot")

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        if self.optimizer_steps < self.warmup_steps:
            all_reduce(bucket.flat(), op="mean", group=self._comm)

    def before_forward(self, step: int) -> None:
        assert self._background is not None
        # Weights must not change between two forwards of one step: the first one's gradients would not fit them.
        first, self._forward_of = self._forward_of != step, step
        if not first or self._background.busy() or step < self.warmup_steps:
            return
        if self._begun:
            self._add_result()
        elif self._training and time.monotonic() >= self._next_at:
            self._begin_round()

    def _begin_round(self) -> None:
        assert self._background is not None
        self._begun = self._buckets
        for bucket in self._buckets:
            bucket.flat("snapshot").copy_(bucket.flat("weight"))
            bucket.flat("mean").copy_(bucket.flat("weight"))
        task = partial(self._round, self._background.comm, self._begun, own=1)
        self._background.submit(task, f"step {self.optimizer_steps}: {self!r}")

    def _round(self, comm: Communicator, buckets: list[_C.Bucket], *, own: int) -> tuple[int, bool]:
        """Makes one round on the background thread. `own`: 1 if this rank trains, else 0.

        Returns how many ranks train, and whether all ranks have ended, so that no other round comes.
        """
        ended = int(self._closing and not own)
        count = torch.tensor([float(own), float(ended)], device=comm.device)
        comm.all_reduce(count).wait()
        training, all_ended = int(count[0].item()), int(count[1].item()) == comm.size
        for bucket in buckets if training else []:
            mean = bucket.flat("mean")
            mean.mul_(own / training)
            all_reduce(mean, deterministic=True, group=comm)
        return training, all_ended

    def _add_result(self) -> None:
        assert self._background is not None
        buckets, self._begun = self._begun, []  # also if wait() raises
        self._background.wait()
        for bucket in buckets:
            bucket.flat("weight").add_(bucket.flat("mean").sub_(bucket.flat("snapshot")))
        self._next_at = time.monotonic() + self.sync_interval_ms / 1000

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        if not warm:
            return Traffic(in_backward=messages.means())
        count = Job(messages.all_reduce(8))
        jobs = [messages.mean(bucket, Identity(), passes=4) for bucket in messages.buckets]
        return Traffic(after=[count, *jobs], pause_s=self.sync_interval_ms / 1000, lockstep=False)

    def abort(self) -> None:
        """Keeps this rank's weights out of the mean, and unchanged, until resume(). The rank still answers others.

        Raises:
            ConfigError: no model is wrapped with it yet.
        """
        if self._background is None:
            raise ConfigError("AsyncModelAverage.abort: no model is wrapped with it yet")
        self._abort(self._background)

    def _abort(self, background: Background) -> None:
        with self._lock:
            if not self._training:
                return
            self._training, self._begun = False, []
            serving, self._serving = self._serving, True
        if not serving:  # a second task would wait for rounds that no other rank makes
            background.submit(partial(self._serve, background.comm), f"{self!r} answers the other ranks")

    def _serve(self, comm: Communicator) -> None:
        while self._answers():
            for bucket in self._buckets:
                bucket.flat("mean").zero_()
            training, all_ended = self._round(comm, self._buckets, own=0)
            if all_ended:
                return
            if not training:
                time.sleep(_IDLE_S)  # until one resumes or all have ended

    def _answers(self) -> bool:
        with self._lock:
            answers = self._serving = not self._training
            return answers

    def resume(self) -> None:
        """Takes part again, from the next round on. Raises as abort()."""
        if self._background is None:
            raise ConfigError("AsyncModelAverage.resume: no model is wrapped with it")
        self._training = True
        self._next_at = 0.0

    def settle(self) -> None:
        """Forgets the round under way, whose result is of the weights before. It ends when the other ranks begin it."""
        self._begun = []

    def leave(self) -> None:
        """Lets the background thread, which keeps the memory, answer the other ranks until they have ended too."""
        if self._background is not None:
            self._closing = True
            self._abort(self._background)

    def close(self, *, crashed: bool = False) -> None:
        """Waits until the other ranks have ended too, and answers them until then."""
        background, self._background = self._background, None
        if background is None:
            return
        try:
            if not crashed:
                self._closing = True
                self._abort(background)
                background.wait()
        finally:
            background.close(crashed=crashed)
