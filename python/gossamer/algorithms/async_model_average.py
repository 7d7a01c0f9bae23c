"""Asynchronous model averaging: ranks train on their own while their weights are averaged in the background.

The algorithm is Bagua's. Ranks hold different weights: model.consensus() averages them exactly.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from gossamer import _C
from gossamer.algorithms.base import Algorithm, Question, require_steps
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

    @property
    def uneven_steps(self) -> bool:
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
        self._rounds = 0
        self._ask: Callable[[], Question] | None = None  # see survive()
        self._said: list[list[int]] = []  # in the round that has ended last
        self._heard: list[list[int]] = []
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
        # Weights must not change between two forwards of one step: the first one's gradients would not fit them.
        first, self._forward_of = self._forward_of != step, step
        if first:
            self._advance(step)

    def before_step(self, step: int) -> None:
        if self._forward_of != step:  # no forward of this step went through the wrapper
            self._advance(step)

    def _advance(self, step: int) -> None:
        assert self._background is not None
        if self._ask is not None or self._background.busy() or step < self.warmup_steps:
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
        task = partial(self._round, self._background.comm, self._begun, self._ask and self._ask(), own=1)
        self._background.submit(task, f"step {self.optimizer_steps}: {self!r}", waits=True)

    def _round(
        self, comm: Communicator, buckets: list[_C.Bucket], question: Question | None, *, own: int
    ) -> tuple[int, bool]:
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
        if question is not None:
            self._said = question(comm)
        return training, all_ended

    def _add_result(self) -> None:
        assert self._background is not None
        buckets, self._begun = self._begun, []  # also if wait() raises
        self._background.wait()
        for bucket in buckets:
            bucket.flat("weight").add_(bucket.flat("mean").sub_(bucket.flat("snapshot")))
        self._next_at = time.monotonic() + self.sync_interval_ms / 1000
        self._rounds += 1
        self._heard = self._said

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        if not warm:
            return Traffic(in_backward=messages.means())
        count = Job(messages.all_reduce(8))
        jobs = [messages.mean(bucket, Identity(), passes=4) for bucket in messages.buckets]
        return Traffic(after=[count, *jobs], pause_s=self.sync_interval_ms / 1000, lockstep=False)

    def abort(self) -> None:
        """Keeps this rank's weights out of the mean, and unchanged, until resume(). The rank still answers others.

        Raises:
            ConfigError: no model is wrapped with it yet, or gs.elastic trains, which needs every rank in all rounds.
        """
        if self._background is None:
            raise ConfigError("AsyncModelAverage.abort: no model is wrapped with it yet")
        if self._ask is not None:
            raise ConfigError(
                "AsyncModelAverage.abort: under gs.elastic every rank takes part in all rounds, in which the group "
                "learns of changes; evaluate without it"
            )
        self._abort(self._background)

    def _abort(self, background: Background) -> None:
        with self._lock:
            if not self._training:
                return
            self._training, self._begun = False, []
            serving, self._serving = self._serving, True
        if not serving:  # a second task would wait for rounds that no other rank makes
            task = partial(self._serve, background.comm)
            background.submit(task, f"{self!r} answers the other ranks", waits=True)

    def _serve(self, comm: Communicator) -> None:
        while self._answers():
            for bucket in self._buckets:
                bucket.flat("mean").zero_()
            training, all_ended = self._round(comm, self._buckets, self._ask and self._ask(), own=0)
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
        super().leave()

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

    # --- in a run whose group changes ---

    def why_not_elastic(self) -> str:
        return f"{self!r} must have no warmup_steps" if self.warmup_steps else ""

    def survive(self, ask: Callable[[], Question]) -> None:
        """From now on rounds are begun, and results added, by advance() and average_now() alone.

        Args:
            ask: called when a round begins. What it returns is collective over the ranks, and called on another thread
                at the end of the round. `heard` has its result.
        """
        self._ask = ask

    @property
    def rounds(self) -> int:
        """Rounds whose result this rank has added. Equal on all ranks after each."""
        return self._rounds

    @property
    def heard(self) -> list[list[int]]:
        """What all ranks have said in the last of these rounds: see survive()."""
        return self._heard

    def resume_at(self, rounds: int) -> None:
        """Sets `rounds`."""
        self._rounds = rounds

    def is_due(self, step: int) -> bool:
        """Whether advance() has something to do before the first forward of a step."""
        if not self._begun:
            return self._training and time.monotonic() >= self._next_at
        return self._background is not None and not self._background.busy() and self._forward_of != step

    def advance(self) -> bool:
        """Begins a round, or adds the result of the one that has ended. Returns whether it has added a result."""
        if self._begun:
            self._add_result()
            return True
        self._begin_round()
        return False

    def average_now(self) -> None:
        """Takes part in the next round before it is due, and waits for its result."""
        if not self._begun:
            self._begin_round()
        self._add_result()

    def part(self) -> None:
        """Ends the connections of the rounds, at a moment when no rank is in one or the group has failed."""
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def lose_group(self) -> None:
        super().lose_group()
        self._next_at = 0.0  # the next round fails at once
