"""Scales learning rates with the number of ranks, as Lightning's HorovodStrategy did."""

from collections.abc import Iterable
from typing import Any

import torch

_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")  # schedulers keep the others beside the current rate
_OF_SCHEDULERS = ("base_lrs", "max_lrs")


def scale_learning_rates(
    optimizers: Iterable[torch.optim.Optimizer], schedulers: Iterable[Any], factor: int
) -> None:
    """Multiply the learning rates of all parameter groups and schedulers, in place."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in _OF_GROUPS:
                if group.get(key) is not None:
                    group[key] = group[key] * factor
    for scheduler in schedulers:
        _scale_scheduler(scheduler, factor)


def _scale_scheduler(scheduler: Any, factor: int) -> None:
    for inner in getattr(scheduler, "_schedulers", ()):  # of ChainedScheduler and SequentialLR
        _scale_scheduler(inner, factor)
    for name in _OF_SCHEDULERS:
        if hasattr(scheduler, name):
            setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
