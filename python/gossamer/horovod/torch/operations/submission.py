"""The last step of every collective in Python: it hands tensors to the native core of a process set.

``NamedCollectives.submit`` (csrc/named/collectives.h) gives the operation to the negotiation (csrc/negotiate). Here it
gets Horovod's name and the line of the script that called. ``refuse`` fails an operation on all ranks.
"""

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import torch

from gossamer.errors import CommError
from gossamer.horovod.common.exceptions import HorovodInternalError, internal_errors
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch.operations.handles import Handle, Pending, PendingGroup, PendingSplits, handle_of
from gossamer.observe.stall import PACKAGES

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]

# The numbers are Horovod's.
Average = 0
"""The mean over the ranks."""
Sum = 1
"""The sum over the ranks."""
Adasum = 2
"""The sum of Adasum, which adds two gradients less what they have in common (Maleki et al., MLSys 2021)."""
Min = 3
"""The least of the ranks' values, element by element."""
Max = 4
"""The largest of the ranks' values, element by element."""
Product = 5
"""The product of the ranks' values, element by element."""
OPS = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}

# The script's own frame is the first one outside of PACKAGES.
_files: dict[str, str | None] = {}  # last part of a path, by path; None inside PACKAGES


def call_site() -> str:
    """Returns the line of the script that called, such as "train.py:12"."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        try:
            shown = _files[file]
        except KeyError:
            shown = _files[file] = None if file.startswith(PACKAGES) else os.path.basename(file)
        if shown is not None:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Group(list[Any]):
    """Tensors that are submitted together, and complete or fail together. Stands where one tensor stands."""


def grouped(tensors: Sequence[Any]) -> Any:
    """Returns a Group of the tensors."""
    return Group(tensors)


def submit(
    kind: str,
    tensor: Any,
    name: str | None,
    process_set: ProcessSet,
    op: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    in_place: bool = False,
    root: int = 0,
    splits: list[int] | None = None,
) -> Handle:
    """Submits an operation on a tensor or a Group.

    Raises ValueError for a wrong argument; the operation then fails on every rank.
    """
    native = process_set.collectives or process_set.native()
    if isinstance(tensor, torch.Tensor):
        tensors, names, whole = [tensor], [f"{kind}.{name}" if name else ""], None
    else:
        tensors, names, whole = _group(kind, tensor, name, process_set)
    try:
        # Positional arguments, because this call is most of what a small operation costs.
        operations = native.submit(
            kind, tensors, names, in_place, op, root, prescale, postscale, splits, whole, call_site()
        )
    except CommError as error:
        raise HorovodInternalError(str(error)) from error
    if whole is None:
        target = tensor if in_place else None
        pending = PendingSplits if kind == "alltoall" else Pending
        return handle_of(pending(operations[0], target))
    targets = tensors if in_place else [None] * len(tensors)
    return handle_of(PendingGroup([Pending(*each) for each in zip(operations, targets, strict=True)]))


def _group(
    kind: str, tensors: Any, name: str | None, process_set: ProcessSet
) -> tuple[list[Any], list[Any], Any]:
    """Returns the tensors of a group, their names and the group's. Raises ValueError for anything but tensors."""
    names = names_of(kind, tensors, name)
    if not isinstance(tensors, Group):
        refuse(process_set, kind, names, f"the argument must be a tensor, got {type(tensors).__name__}")
    if not tensors:
        raise ValueError(f"hvd.grouped_{kind}: needs at least one tensor, got an empty list")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            refuse(process_set, kind, names, f"the arguments must be tensors, got {type(tensor).__name__}")
    return list(tensors), names, f"grouped_{kind}.{name}" if name else ""


def names_of(kind: str, tensor: Any, name: str | None) -> list[str | None]:
    """Returns the name of an operation. For a Group: its members' names, "grouped_allreduce.<name>_1of3", or empty."""
    if not isinstance(tensor, Group):
        return [name]
    count = len(tensor)
    return [f"grouped_{kind}.{name}_{index}of{count}" if name else "" for index in range(1, count + 1)]


def refuse(
    process_set: ProcessSet,
    kind: str,
    names: Sequence[str | None],
    reason: str,
    error: type[Exception] = ValueError,
) -> NoReturn:
    """Raises `error`, and fails the operation on the other ranks, which would wait for this rank otherwise.

    Args:
        names: the operation's names, as names_of() gives them.
    """
    native, site = process_set.native(), call_site()
    for name in names:
        whole = name if not name or name.startswith("grouped_") else f"{kind}.{name}"
        try:
            with internal_errors(CommError):
                native.refuse(kind, whole or "", reason, site)
        except ValueError:  # an operation of that name is in flight already, and is left alone
            continue
    shown = f" {names[0]!r}" if names and names[0] else ""
    raise error(f"hvd.{kind}{shown}: {reason}")
