"""``Request``: what a DistributedOptimizer asks its reduction for."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common.process_sets import ProcessSet


@dataclass(frozen=True)
class Request:
    """The parameters whose gradients are reduced, and how.

    Args:
        names, params: all parameters of the optimizer, in its order.
        trained: indices of those that need gradients when the request is made; others may later.
        groups: indices of parameters that are reduced together; the others are reduced alone.
    """

    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    trained: frozenset[int]
    compression: Any
    op: int
    predivide: float
    groups: tuple[tuple[int, ...], ...]
    sparse_as_dense: bool
    process_set: ProcessSet

    def is_trained(self, index: int) -> bool:
        """Returns whether a parameter needs a gradient, or did when the request was made."""
        return index in self.trained or self.params[index].requires_grad


def request_of(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], groups: Any, **settings: Any
) -> Request:
    """Returns the request for the optimizer's current parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trained = [index for index, param in enumerate(params) if param.requires_grad]
    return Request(
        names=tuple(names[param] for param in params),
        params=tuple(params),
        trained=frozenset(trained),
        groups=_groups(groups, params, trained),
        **settings,
    )


def _groups(groups: Any, params: Sequence[Tensor], trained: list[int]) -> tuple[tuple[int, ...], ...]:
    if groups is None or groups == 0:
        return ()
    if isinstance(groups, int):
        each, more = divmod(len(trained), groups)
        starts = [k * each + min(k, more) for k in range(groups + 1)]
        chunks = [tuple(trained[slice(*bounds)]) for bounds in itertools.pairwise(starts)]
        return tuple(chunk for chunk in chunks if chunk)
    place = {id(params[index]): index for index in trained}
    members = (tuple(place[id(param)] for param in each if id(param) in place) for each in groups)
    return tuple(group for group in members if group)
