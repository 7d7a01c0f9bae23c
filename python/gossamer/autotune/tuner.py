"""Tuning while training: changes bucket size and codecs at the end of a backward, times the steps that follow, and puts
the same choice into effect on all ranks. search.py decides what is tried; the clock and the agreement are here.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import torch

from gossamer.autotune import search
from gossamer.autotune.search import Outcome, Search, Trial
from gossamer.autotune.settings import Autotune, Tunable, Tuned
from gossamer.codec import Codec
from gossamer.comm import Communicator

_log = logging.getLogger("gossamer")


class Plan(Protocol):
    """What a tuner asks of an engine: its buckets, and another plan of them."""

    bucket_bytes: int
    all: list[Any]
    #: The work of each bucket, which measures how long it takes, while buckets are timed.
    clocks: list[Any]

    def planned(self, bucket_bytes: int) -> list[list[str]]:
        """The names of the parameters in each bucket, if buckets had this size."""

    def rebuild(self, bucket_bytes: int, *, timed: bool = False) -> None:
        """Makes buckets of this size; with `timed`, `clocks` then measures each."""


class Tuner:
    """Drives one search. The engine calls backward_ended() on every rank at the same place.

    Args:
        codecs: the codecs to try for a bucket in addition to its own.
        done: called once, with the result.
    """

    def __init__(
        self,
        settings: Autotune,
        codecs: Sequence[Codec | None],
        buckets: Plan,
        algorithm: Tunable,
        *,
        control: Communicator,
        done: Callable[[Tuned], None],
    ) -> None:
        self._settings, self._codecs, self._buckets = settings, codecs, buckets
        self._algorithm, self._control, self._done = algorithm, control, done
        self._search: Search | None = None
        self._given_bytes = buckets.bucket_bytes

    def restart(self) -> None:
        """Starts the search again after the next backward, because the measured times belong to another run."""
        self._search = None

    def backward_ended(self) -> None:
        """Notes the time. At the end of a trial, the ranks agree on its outcome and start the next trial."""
        if self._search is not None and self._buckets.all is not self._planned:
            self.restart()  # the plan changed: a parameter became trainable, or the order of arrival came late
        if self._search is None:
            self._steps, self._tried = 0, []
            sizes = self._sizes()
            self._search = search.search(sizes, 1 + len(self._codecs))
            self._advance(lambda begun: next(begun))
            return
        self._steps += 1
        self._marks.append(_mark(self._buckets.all[0].device))
        if len(self._marks) == self._trial.steps + 1:
            outcome = self._outcome()
            self._tried.append((self._trial.bucket_bytes, self._trial.codecs, median(outcome.steps)))
            self._advance(lambda running: running.send(outcome))

    def _sizes(self) -> list[int]:
        if self._settings.bucket_bytes is not None:
            return list(dict.fromkeys([self._given_bytes, *self._settings.bucket_bytes]))
        total = sum(bucket.bytes for bucket in self._buckets.all)
        return search.candidate_sizes(self._given_bytes, total, lambda size: len(self._buckets.planned(size)))

    def _advance(self, step: Callable[[Search], Trial]) -> None:
        assert self._search is not None
        try:
            self._apply(step(self._search))
        except StopIteration as end:
            self._finish(end.value)

    def _apply(self, trial: Trial) -> None:
        self._trial = trial
        self._marks: list[Any] = []
        self._install(trial, timed=True)
        self._planned = self._buckets.all  # another list whenever the plan changes

    def _finish(self, best: Trial) -> None:
        codecs = self._install(best, timed=False)
        named = {name: repr(codec) for name, codec in codecs.items()}
        tuned = Tuned(best.bucket_bytes, named, self._steps, self._tried)
        _log.info("rank %d: tuned in %d steps: %s", self._control.rank, self._steps, tuned)
        self._done(tuned)

    def _install(self, trial: Trial, *, timed: bool) -> Mapping[str, Codec | None]:
        codecs: dict[str, Codec | None] = {}
        for index, names in enumerate(self._buckets.planned(trial.bucket_bytes)):
            number = trial.codecs if isinstance(trial.codecs, int) else trial.codecs[index]
            if number > 0:
                codecs.update(dict.fromkeys(names, self._codecs[number - 1]))
        self._algorithm.use_codecs(codecs)
        self._buckets.rebuild(trial.bucket_bytes, timed=timed)
        return codecs

    def _outcome(self) -> Outcome:
        steps = [_seconds(*pair) for pair in zip(self._marks, self._marks[1:], strict=False)]
        buckets = [work.take_seconds()[-len(steps) :] for work in self._buckets.clocks]
        mine = torch.tensor([steps, *buckets], dtype=torch.float64)
        gathered = mine.new_empty(self._control.size * mine.numel())
        self._control.all_gather(gathered, mine.view(-1)).wait()
        every = gathered.view(self._control.size, *mine.shape)
        # A step takes as long as on the slowest rank. A bucket takes as long as on the rank that came last to it,
        # because that rank waited for no other.
        slowest, quickest = every[:, 0].amax(0), every[:, 1:].amin(0)
        return Outcome(slowest.tolist(), quickest.T.tolist())


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
