"""What a tuner tries, in which order, and what it concludes. Pure: no clock, no collective; tuner.py supplies both.

Bucket sizes first, by elimination: all a few steps, the better half again, the best two once more. Then, with the size
that won, the codec of each bucket by the time of its own communication; and last the mixture against the best single
codec, by the time of whole steps.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median

MAX_STEPS = 200
MOST_SIZES = 10
_ROUNDS = (3, 5, 8)  # measured steps for all sizes, for the better half, for the best two
_CODEC_STEPS = 8
_FINAL_STEPS = 10
_SETTLING = 1  # a step after each change, which nobody measures
_STEP_GAIN = 0.98  # of the time before; what is less is noise, and changes nothing
_BUCKET_GAIN = 0.9


@dataclass(frozen=True)
class Trial:
    """How the next steps are to be done.

    Attributes:
        codecs: the number of a codec for each bucket, or one for all; 0 is the algorithm's own choice.
        steps: how many are measured, behind one that is not.
    """

    bucket_bytes: int
    codecs: int | tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Outcome:
    """Seconds, the same numbers on every rank: of whole steps, and of each bucket's communication in each step."""

    steps: list[float]
    buckets: list[list[float]]


Search = Generator[Trial, Outcome, Trial]


def steps_needed(sizes: int, codecs: int) -> int:
    """Synchronised backwards that a search takes at most."""
    rounds = zip((sizes, _half(sizes), 2), _ROUNDS, strict=True) if sizes > 1 else ()
    by_size = sum(count * (_SETTLING + steps) for count, steps in rounds)
    by_codec = codecs * (_SETTLING + _CODEC_STEPS) + 2 * (_SETTLING + _FINAL_STEPS) if codecs > 1 else 0
    return 1 + by_size + by_codec  # after the first backward, whose order of arrival is the plan's


def search(sizes: Sequence[int], codecs: int) -> Search:
    """Yields trials, is sent their outcomes, and returns the trial that won (its `steps` is 0).

    Args:
        sizes: bytes of a bucket; the first is what is kept unless another one is clearly faster.
        codecs: how many there are; 0 is kept for each bucket unless another one is clearly faster there.
    """
    size = sizes[0]
    if len(sizes) > 1:
        size = yield from _best_size(sizes)
    best: int | tuple[int, ...] = 0
    if codecs > 1:
        best = yield from _best_codecs(size, codecs)
    return Trial(size, best, 0)


def _best_size(sizes: Sequence[int]) -> Generator[Trial, Outcome, int]:
    seen: dict[int, list[float]] = {size: [] for size in sizes}
    alive = list(sizes)
    for number, steps in enumerate(_ROUNDS):
        # To and fro, so that a machine that grows slower or faster favours none.
        for size in alive if number % 2 == 0 else alive[::-1]:
            seen[size] += (yield Trial(size, 0, steps)).steps
        alive.sort(key=lambda size: median(seen[size]))
        alive = alive[: _half(len(sizes)) if number == 0 else 2]
    return alive[0] if median(seen[alive[0]]) < _STEP_GAIN * median(seen[sizes[0]]) else sizes[0]


def _best_codecs(size: int, codecs: int) -> Generator[Trial, Outcome, int | tuple[int, ...]]:
    outcomes = []
    for codec in range(codecs):
        outcomes.append((yield Trial(size, codec, _CODEC_STEPS)))
    by_bucket = [
        [median(step[bucket] for step in outcome.buckets) for outcome in outcomes]
        for bucket in range(len(outcomes[0].buckets[0]))
    ]
    mixture = tuple(_fastest(seconds, _BUCKET_GAIN) for seconds in by_bucket)
    single = _fastest([median(outcome.steps) for outcome in outcomes], _STEP_GAIN)
    if all(codec == single for codec in mixture):
        return single
    rivals: list[int | tuple[int, ...]] = [single, mixture]
    seconds = []
    for codecs_of in rivals:
        seconds.append(median((yield Trial(size, codecs_of, _FINAL_STEPS)).steps))
    return rivals[_fastest(seconds, _STEP_GAIN)]


def _half(sizes: int) -> int:
    return max(2, -(-sizes // 2))


def _fastest(seconds: Sequence[float], gain: float) -> int:
    """The index of the smallest, or 0 unless it is smaller by that much."""
    best = min(range(len(seconds)), key=lambda index: seconds[index])
    return best if seconds[best] < gain * seconds[0] else 0


def candidate_sizes(given: int, total: int, count: Callable[[int], int]) -> list[int]:
    """Sizes worth a trial: `given`, then powers of two from 256 KiB, and all `total` bytes, if they make other plans.

    Args:
        count: how many buckets a size makes.
    """
    powers = [2**power for power in range(18, 31) if 2**power < total]
    found = {count(given): given}
    for size in [*powers, max(total, 1)]:
        found.setdefault(count(size), size)
    sizes = sorted(size for size in found.values() if size != given)
    if len(sizes) >= MOST_SIZES:  # the smallest are the least likely to win
        sizes = sizes[1 - MOST_SIZES :]
    return [given, *sizes]
