"""Checks of the arguments of ``DistributedOptimizer``, which bring them into one form."""

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common import basics
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch.compression import GossamerCompressor
from gossamer.horovod.torch.operations.submission import OPS, Average, Sum

WHERE = "hvd.DistributedOptimizer"
NO_NAME = "allreduce.noname"


def check_settings(*, compression: Any, passes: Any, op: Any, predivide: float, process_set: Any) -> None:
    """Raises ValueError for settings that cannot work, alone or together; and before hvd.init()."""
    basics.size()
    if op not in OPS:
        raise ValueError(f"{WHERE}: op must be one of {OPS}, got {op!r}")
    check_passes(passes)
    if predivide != 1.0 and op != Average:
        raise ValueError(
            f"{WHERE}: gradient_predivide_factor needs op=Average, got {predivide} with op {OPS[op]}"
        )
    if not predivide > 0:
        raise ValueError(f"{WHERE}: gradient_predivide_factor must be above 0, got {predivide}")
    if not isinstance(process_set, ProcessSet) or process_set.included() is None:
        raise ValueError(f"{WHERE}: process_set must be a registered ProcessSet, got {process_set!r}")
    if isinstance(compression, GossamerCompressor) and (op not in (Average, Sum) or predivide != 1.0):
        raise ValueError(
            f"{WHERE}: {compression!r} needs op Average or Sum and gradient_predivide_factor 1 (its sums are taken in "
            f"float32), got op {OPS[op]} and {predivide}"
        )


def check_passes(passes: Any) -> None:
    """Raises ValueError unless it is a whole number from 1."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"{WHERE}: backward_passes_per_step must be a whole number from 1, got {passes!r}")


def name_group(names: dict[Tensor, str], group: int, params: Iterable[Tensor]) -> None:
    """Names the parameters of a group that have no name yet by their group and place."""
    for place, param in enumerate(params):
        names.setdefault(param, f"{NO_NAME}.{group}.{place}")


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Returns a name for each parameter of the optimizer, and for others that were given.

    Raises:
        ValueError: an entry is not a (name, parameter), a name stands twice, or a parameter of the optimizer has none.
    """
    own: dict[Tensor, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        name_group(own, number, group["params"])
    if named_parameters is None:
        return own
    given = list(named_parameters)
    for entry in given:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
            raise ValueError(
                f"{WHERE}: named_parameters must be (name, parameter) tuples, as model.named_parameters() gives them, "
                f"got {type(entry).__name__}"
            )
    twice = sorted(name for name, count in Counter(name for name, _ in given).items() if count > 1)
    if twice:
        raise ValueError(f"{WHERE}: names in named_parameters must be unique, got twice: {', '.join(twice)}")
    names = {param: name for name, param in sorted(given, key=lambda entry: entry[0])}
    unnamed = [place for param, place in own.items() if param not in names]
    if unnamed:
        shown = ", ".join(place.removeprefix(f"{NO_NAME}.") for place in unnamed[:6])
        raise ValueError(
            f"{WHERE}: named_parameters must name every parameter of the optimizer, but {len(unnamed)} have no name "
            f"(parameter group and place: {shown})"
        )
    return names


def groups_argument(groups: Any, num_groups: int) -> Any:
    """Returns `groups`, or what the deprecated `num_groups` says instead. Raises ValueError for a wrong value."""
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: give groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    where = f"{WHERE}: groups"
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
    if len(set(map(id, members))) != len(members):
        raise ValueError(f"{where} must hold a parameter once, got one of them several times")
    return groups
