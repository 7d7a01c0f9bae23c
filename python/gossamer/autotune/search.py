"""What a tuner tries, in which order, and what it concludes. No clock and no collective: tuner.py supplies both.

Bucket sizes come first. Every size runs for a few steps, then the better half again, then the best two. The codecs come
next, with the size that won: each bucket gets the codec with which its own communication is fastest. At last this
mixture runs against the best single codec, by the time of whole steps.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median

MAX_STEPS = 200
MOST_SIZES = 10
_ROUNDS = (3, 5, 8)  # measured steps for all sizes, for the better half, for the best two
_CODEC_STEPS = 8
_FINAL_STEPS = 10
_SETTLING = 1  # steps after each change that are not measured
_STEP_GAIN = 0.98  # a new setting must take at most this share of the old time; a smaller gain is noise
_BUCKET_GAIN = 0.9


@dataclass(frozen=True)
class Trial:
    """The settings of the next steps.

    Attributes:
        codecs: the number of a codec for each bucket, or one for all; 0 is the algorithm's own choice.
        steps: the number of measured steps; one unmeasured step comes before them.
    """

    bucket_bytes: int
    codecs: int | tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Outcome:
    """Seconds of whole steps, and of each bucket's communication in each step. Equal on every rank."""

    steps: list[float]
    buckets: list[list[float]]


Search = Generator[Trial, Outcome, Trial]


def steps_needed(sizes: int, codecs: int) -> int:
    """The largest number of synchronised backwards that a search takes."""
    rounds = zip((sizes, _half(sizes), 2), _ROUNDS, strict=True) if sizes > 1 else ()
    by_size = sum(count * (_SETTLING + steps) for count, steps in rounds)
    by_codec = codecs * (_SETTLING + _CODEC_STEPS) + 2 * (_SETTLING + _FINAL_STEPS) if codecs > 1 else 0
    return 1 + by_size + by_codec  # the first backward only gives the order of arrival


def search(sizes: Sequence[int], codecs: int) -> Search:
    """Yields trials, is sent their outcomes, and returns the trial that won (its `steps` is 0).

    Args:
        sizes: bytes of a bucket. The first is kept unless another one is clearly faster.
        codecs: the number of codecs. Codec 0 is kept for a bucket unless another one is clearly faster there.
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
        # Forwards, then backwards, so that a machine that becomes slower or faster favours no size.
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
    """The index of the smallest value, or 0 if the gain over value 0 is too small."""
    best = min(range(len(seconds)), key=lambda index: seconds[index])
    return best if seconds[best] < gain * seconds[0] else 0


def candidate_sizes(given: int, total: int, count: Callable[[int], int]) -> list[int]:
    """Sizes worth a trial: `given`, then powers of two from 256 KiB and `total`, each if it makes another plan.

    Args:
        count: gives the number of buckets that a size makes.
    """
    powers = [2**power for power in range(18, 31) if 2**power < total]
    found = {count(given): given}
    for size in [*powers, max(total, 1)]:
        found.setdefault(count(size), size)
    sizes = sorted(size for size in found.values() if size != given)
    if len(sizes) >= MOST_SIZES:  # drop the smallest, which are the least likely to win
        sizes = sizes[1 - MOST_SIZES :]
    return [given, *sizes]
