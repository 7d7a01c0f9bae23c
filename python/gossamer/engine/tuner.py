"""Tuning while training: changes bucket size and codecs at the end of a backward, times the steps after it, and lets
all ranks go on with the same. search.py decides what is tried; here are clock, agreement and effect. Used by engine.py.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from gossamer.codec import Codec
from gossamer.comm import Communicator
from gossamer.engine import search
from gossamer.engine.buckets import Buckets
from gossamer.engine.search import Outcome, Search, Trial
from gossamer.engine.worker import Moments
from gossamer.errors import ConfigError

_log = logging.getLogger("gossamer")


@dataclass(frozen=True)
class Autotune:
    """What DataParallel(autotune=...) tries; autotune=True is Autotune().

    Args:
        bucket_bytes: sizes to try beside the wrapper's own. None: powers of two from 256 KiB, and all in one, as far
            as they make other plans; ten sizes at most.
        codecs: what a bucket may travel by beside the algorithm's codec, and beside exactly. By default a bucket is
            never sent with less precision than the algorithm has. Errors are fed back where the algorithm's own codec
            does so, with every codec.

    Raises:
        ConfigError: sizes that are not positive, a codec that is none, or so many that 200 steps are not enough.
    """

    bucket_bytes: Sequence[int] | None = None
    codecs: Sequence[Codec | None] = ()

    def __post_init__(self) -> None:
        sizes = self.bucket_bytes if self.bucket_bytes is not None else ()
        if not isinstance(sizes, Sequence) or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ConfigError(f"Autotune: bucket_bytes must be a list of positive integers, got {sizes!r}")
        codecs = self.codecs
        listed = isinstance(codecs, Sequence)
        if not listed or not all(codec is None or isinstance(codec, Codec) for codec in codecs):
            raise ConfigError(f"Autotune: codecs must be a list of Codecs or None, got {codecs!r}")
        tried = 1 + len(sizes) if self.bucket_bytes is not None else search.MOST_SIZES
        needed = search.steps_needed(tried, 2 + len(codecs))
        if needed > search.MAX_STEPS:
            raise ConfigError(
                f"Autotune: must converge within {search.MAX_STEPS} steps, but {tried} sizes and "
                f"{len(codecs)} codecs take up to {needed}; give fewer"
            )


@dataclass(frozen=True)
class Tuned:
    """What tuning ended with: the same on every rank.

    Attributes:
        bucket_bytes: of a bucket from now on.
        codecs: parameter name -> repr of what it travels by, where that is not the algorithm's own codec.
        steps: synchronised backwards that it took.
        tried: (bucket_bytes, codec of each bucket as a number or one for all, median seconds of a step).
    """

    bucket_bytes: int
    codecs: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    tried: list[tuple[int, int | tuple[int, ...], float]] = field(default_factory=list)

    def saved(self) -> dict[str, Any]:
        """What a resumed run needs of it."""
        return {"bucket_bytes": self.bucket_bytes, "codecs": self.codecs}


def autotune_of(given: object) -> Autotune | None:
    """What a face's argument means: True, False or an Autotune."""
    if isinstance(given, bool):
        return Autotune() if given else None
    if not isinstance(given, Autotune):
        raise ConfigError(f"autotune: must be True, False or an Autotune, got {given!r}")
    return given


def refusal_of_tuning(settings: Autotune | None, algorithm: Moments) -> ConfigError | None:
    """Why this algorithm cannot be tuned, or None."""
    if settings is None:
        return None
    if "grad" not in algorithm.fields or "weight" in algorithm.fields or not algorithm.lockstep:
        return ConfigError(
            f"autotune: needs an algorithm that averages gradients in every step, got {algorithm!r}, whose plan is "
            f"fixed; leave autotune out"
        )
    if torch.are_deterministic_algorithms_enabled() and not algorithm.deterministic:
        return ConfigError(
            f"autotune: under torch.use_deterministic_algorithms, what was measured must not decide about bits, but "
            f"those of {algorithm!r} depend on it; use GradientAllReduce(deterministic=True)"
        )
    try:
        algorithm.codec_choices(settings.codecs)
    except ConfigError as refusal:
        return refusal
    return None


class Tuner:
    """Drives one search. The engine calls backward_ended() on every rank at the same place.

    Args:
        codecs: what a bucket may travel by beside its own codec.
        done: called once, with the result.
    """

    def __init__(
        self,
        settings: Autotune,
        codecs: Sequence[Codec | None],
        buckets: Buckets,
        algorithm: Moments,
        *,
        control: Communicator,
        done: Callable[[Tuned], None],
    ) -> None:
        self._settings, self._codecs, self._buckets = settings, codecs, buckets
        self._algorithm, self._control, self._done = algorithm, control, done
        self._search: Search | None = None
        self._given_bytes = buckets.bucket_bytes

    def restart(self) -> None:
        """Begins anew after the next backward: what was measured belongs to another run."""
        self._search = None

    def backward_ended(self) -> None:
        """Takes the time. When a trial is over: agrees on its outcome, and puts the next one into effect."""
        if self._search is not None and self._buckets.all is not self._planned:
            self.restart()  # parameters were thawed, or the order of arrival came late: it is another plan
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
        # A step takes as long as on the slowest rank; a bucket as long as on the last that came, which waited for none.
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
