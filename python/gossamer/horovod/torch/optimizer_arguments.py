# What DistributedOptimizer takes, checked and brought into one form. No hooks, and nothing sent: reduction.py works by
# it.
"""The arguments of ``DistributedOptimizer``."""

import itertools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common import basics
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch.compression import GossamerCompressor
from gossamer.horovod.torch.submission import OPS, Average, Sum

NO_NAME = "allreduce.noname"


@dataclass(frozen=True)
class Request:
    """What is reduced, and how.

    ``names`` and ``params``: of the same order, all that the optimizer has. ``trained``: indices of those that need
    gradients when it is made; others may, later. ``groups``: indices of such that are reduced together; the others
    alone.
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


def request_of(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], groups: Any, **settings: Any
) -> Request:
    """The request for the parameters as they are now, in the order of the optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trained = [index for index, param in enumerate(params) if param.requires_grad]
    return Request(
        names=tuple(names[param] for param in params),
        params=tuple(params),
        trained=frozenset(trained),
        groups=_groups(groups, params, trained),
        **settings,
    )


def check_settings(*, compression: Any, passes: Any, op: Any, predivide: float, process_set: Any) -> None:
    """ValueError for settings that cannot work, alone or together; or before hvd.init()."""
    basics.size()
    where = "hvd.DistributedOptimizer"
    if op not in OPS:
        raise ValueError(f"{where}: op must be one of {OPS}, got {op!r}")
    check_passes(where, passes)
    if predivide != 1.0 and op != Average:
        raise ValueError(
            f"{where}: gradient_predivide_factor needs op=Average, got {predivide} with op {OPS[op]}"
        )
    if not predivide > 0:
        raise ValueError(f"{where}: gradient_predivide_factor must be above 0, got {predivide}")
    if not isinstance(process_set, ProcessSet) or process_set.included() is None:
        raise ValueError(f"{where}: process_set must be a registered ProcessSet, got {process_set!r}")
    if not isinstance(compression, GossamerCompressor):
        return
    if op not in (Average, Sum) or predivide != 1.0:
        raise ValueError(
            f"{where}: {compression!r} needs op Average or Sum and gradient_predivide_factor 1 (its sums are taken in "
            f"float32), got op {OPS[op]} and {predivide}"
        )


def check_passes(where: str, passes: Any) -> None:
    """ValueError unless it is a whole number from 1."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"{where}: backward_passes_per_step must be a whole number from 1, got {passes!r}")


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """A name for each parameter of the optimizer, and for others that were given.

    ValueError: entries that are no (name, parameter), a name twice, or a parameter of the optimizer without a name.
    """
    own = [
        (f"{NO_NAME}.{i}.{j}", param)
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
    ]
    if named_parameters is None:
        return {param: name for name, param in own}
    given = list(named_parameters)
    for entry in given:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
            raise ValueError(
                "hvd.DistributedOptimizer: named_parameters must be (name, parameter) tuples, as "
                f"model.named_parameters() gives them, got {type(entry).__name__}"
            )
    seen: set[str] = set()
    twice = sorted({name for name, _ in given if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise ValueError(
            f"hvd.DistributedOptimizer: names in named_parameters must be unique, got twice: {', '.join(twice)}"
        )
    names = {param: name for name, param in sorted(given, key=lambda entry: entry[0])}
    unnamed = [place for place, param in own if param not in names]
    if unnamed:
        shown = ", ".join(place.removeprefix(f"{NO_NAME}.") for place in unnamed[:6])
        raise ValueError(
            f"hvd.DistributedOptimizer: named_parameters must name every parameter of the optimizer, but "
            f"{len(unnamed)} have no name (parameter group and place: {shown})"
        )
    return names


def groups_argument(groups: Any, num_groups: int) -> Any:
    """`groups`, or what the deprecated argument says in its place. ValueError for what is neither."""
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: give groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    where = "hvd.DistributedOptimizer: groups"
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"{where} must be at least 0, got {groups}")
        return groups
    if not isinstance(groups, (list, tuple)) or not all(isinstance(each, (list, tuple)) for each in groups):
        raise ValueError(f"{where} must be a number or a list of lists of parameters, got {groups!r}")
    members = [member for each in groups for member in each]
    for member in members:
        if not isinstance(member, Tensor):
            raise ValueError(f"{where} must hold parameters, got {type(member).__name__}")
    if len({id(member) for member in members}) != len(members):
        raise ValueError(f"{where} must hold a parameter once, got one of them several times")
    return groups


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
