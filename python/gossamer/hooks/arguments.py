"""Checks the model and the group that State is given."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.comm import given_group, is_communicator
from gossamer.errors import ConfigError


def named_parameters(model: Any) -> Iterable[tuple[str, nn.Parameter]]:
    """Returns the (name, parameter) pairs of the model that State was given, named as without DDP around it."""
    if isinstance(model, DistributedDataParallel):
        return model.module.named_parameters()
    if isinstance(model, nn.Module):
        return model.named_parameters()
    named = (
        list(model) if isinstance(model, Iterable) and not isinstance(model, (str, bytes, dict)) else [model]
    )
    for pair in named:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise ConfigError(
                "hooks.State: model must be a DistributedDataParallel, a module or (name, parameter) pairs, got "
                f"{pair!r}"
            )
    return named


def group_of(model: Any, group: Any) -> Any:
    """Returns the group that State uses. ConfigError if it is not the group that the model averages over."""
    if not isinstance(model, DistributedDataParallel):
        return group
    own, given = model.process_group, given_group(group)
    if given is None:
        return own if group is None else replace(group, group=own)
    wanted = (own.rank(), own.size())
    if given is own or (is_communicator(given) and (given.rank, given.size) == wanted):
        return group
    got = f"rank {given.rank} of {given.size}" if is_communicator(given) else repr(given)
    raise ConfigError(
        f"hooks.State: process_group must be the one that the model averages over, where this is rank {wanted[0]} of "
        f"{wanted[1]}, got {got}"
    )
