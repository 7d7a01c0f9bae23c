"""What a user asks of tuning, what tuning ends with, and what it cannot tune."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from gossamer.autotune import search
from gossamer.codec import Codec
from gossamer.errors import ConfigError


class Tunable(Protocol):
    """What tuning asks of an algorithm (gossamer.algorithms.Algorithm)."""

    fields: ClassVar[tuple[str, ...]]
    deterministic: bool

    @property
    def lockstep(self) -> bool: ...
    def codec_choices(self, extra: Sequence[Codec | None]) -> list[Codec | None]: ...
    def use_codecs(self, codecs: Mapping[str, Codec | None]) -> None: ...


@dataclass(frozen=True)
class Autotune:
    """What DataParallel(autotune=...) tries; autotune=True means Autotune().

    Args:
        bucket_bytes: bucket sizes to try in addition to the wrapper's own. None tries powers of two from 256 KiB, and
            one bucket for all parameters; sizes that lead to the same buckets are tried once. At most ten sizes.
        codecs: codecs to try for each bucket, in addition to the algorithm's own codec and to exact values. None of
            these are tried by default, so no bucket loses precision. If the algorithm's own codec feeds errors back,
            errors are fed back with every codec.

    Raises:
        ConfigError: a size is not positive, a codec is not a Codec, or the trials would take more than 200 steps.
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
    """The result of tuning. It is the same on every rank.

    Attributes:
        bucket_bytes: the bucket size from now on.
        codecs: parameter name -> repr of its codec, for parameters that do not use the algorithm's own codec.
        steps: synchronised backwards that tuning took.
        tried: (bucket_bytes, the number of one codec for all buckets or of each bucket's codec, median seconds of a
            step).
    """

    bucket_bytes: int
    codecs: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    tried: list[tuple[int, int | tuple[int, ...], float]] = field(default_factory=list)

    def saved(self) -> dict[str, Any]:
        """The part that a resumed run needs."""
        return {"bucket_bytes": self.bucket_bytes, "codecs": self.codecs}


def autotune_of(given: object) -> Autotune | None:
    """The Autotune that a wrapper's argument stands for: True, False or an Autotune."""
    if isinstance(given, bool):
        return Autotune() if given else None
    if not isinstance(given, Autotune):
        raise ConfigError(f"autotune: must be True, False or an Autotune, got {given!r}")
    return given


def refusal_of_tuning(settings: Autotune | None, algorithm: Tunable) -> ConfigError | None:
    """The reason why this algorithm cannot be tuned, or None."""
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
