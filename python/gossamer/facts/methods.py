"""A method is an algorithm with settings, under one name. The algorithms list their methods.

`gossamer plan`, `gossamer bench network` and the hooks for stock DDP offer them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXACT = "exact"
"""The kind of a method that trains with the exact mean gradient."""
ROUNDED = "rounded"
"""The kind of a method that trains with the mean of rounded gradients."""
COMPRESSED = "compressed"
"""The kind of a method that sends gradients or momenta in few bits, and feeds their errors back."""
APART = "apart"
"""The kind of a method whose ranks hold different weights between averagings."""
KINDS = (EXACT, ROUNDED, COMPRESSED, APART)
"""The kinds of a method, from the one that keeps most of a training to the one that keeps least."""


@dataclass(frozen=True)
class Settings:
    """The settings of a method that a user of the planner may choose.

    Args:
        period: steps between two averagings, for methods that average at some steps only.
        rank: columns of PowerSGD's factors.
    """

    period: int = 32
    rank: int = 4


@dataclass(frozen=True)
class Trial:
    """How `gossamer bench network` trains with a method.

    Args:
        make: makes the algorithm if it differs from the method's own.
        periodic: the method sends once in Settings.period steps.
        apart: ranks hold different weights at the end of a period.
        offset: steps after the end of a period at which no transfer is under way.
        by_clock: the method sends by the clock, not by steps, and never rests.
    """

    make: Callable[[Settings], Any] | None = None
    periodic: bool = False
    apart: bool = False
    offset: int = 0
    by_clock: bool = False


@dataclass(frozen=True)
class Method:
    """One way to use an algorithm.

    Args:
        name: the name in the planner, in `gossamer bench network` and in gossamer.hooks. No two methods share one.
        make: makes the algorithm from the settings that a user may choose.
        kind: one of KINDS.
        changes: what the method changes about a training. The text completes the sentence "It ...".
        page: the page in docs/ that describes it.
        warm: False describes the steps of the algorithm's warm-up, True those after it.
        advised: whether the planner may advise it.
        trial: how `gossamer bench network` trains with it. None: not at all.
        hook: whether gossamer.hooks.NAME is a communication hook for stock DDP. The algorithm must define
            for_any_buckets().
    """

    name: str
    make: Callable[[Settings], Any]
    kind: str
    changes: str
    page: str
    warm: bool = True
    advised: bool = True
    trial: Trial | None = None
    hook: bool = False
