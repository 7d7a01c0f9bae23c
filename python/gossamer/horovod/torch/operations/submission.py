"""The last step of every collective in Python: it hands tensors to the native core of a process set.

``NamedCollectives.submit`` (csrc/named/collectives.h) gives the operation to the negotiation (csrc/negotiate). Here it
gets Horovod's name and the line of the script that called. ``refuse`` fails an operation on all ranks.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from gossamer.errors import CommError
from gossamer.horovod.common.exceptions import HorovodInternalError, internal_errors
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch.operations.handles import Handle, Pending, PendingGroup, handle_of

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

# The script's own frame is the first one outside these folders.
PACKAGES = tuple(
    str(folder) + os.sep for folder in (Path(__file__).resolve().parents[3], Path(torch.__file__).parent)
)
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


def one(
    kind: str,
    tensor: Any,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    pending: type[Pending] = Pending,
    op: int = Sum,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: list[int] | None = None,
) -> Handle:
    """Submits one operation. Raises ValueError for a wrong argument; the operation then fails on every rank."""
    native = process_set.collectives or process_set.native()
    if not isinstance(tensor, torch.Tensor):
        refuse(process_set, kind, [name], f"the argument must be a tensor, got {type(tensor).__name__}")
    try:
        names = [f"{kind}.{name}" if name else ""]
        # Positional arguments, because this call is most of what a small operation costs.
        (operation,) = native.submit(
            kind, [tensor], names, in_place, op, root, prescale, postscale, splits, None, call_site()
        )
    except CommError as error:
        raise HorovodInternalError(str(error)) from error
    return handle_of(pending(operation, tensor if in_place else None))


def group(
    kind: str,
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    **options: Any,
) -> Handle:
    """Submits operations that complete or fail together. Raises as one()."""
    native = process_set.native()
    tensors = list(tensors)
    if not tensors:
        raise ValueError(f"hvd.grouped_{kind}: needs at least one tensor, got an empty list")
    names = group_names(kind, name, len(tensors))
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            reason = f"the arguments must be tensors, got {type(tensor).__name__}"
            refuse(process_set, kind, names, reason)
    whole, site = f"grouped_{kind}.{name}" if name else "", call_site()
    try:
        operations = native.submit(kind, tensors, names, in_place, group=whole, call_site=site, **options)
    except CommError as error:
        raise HorovodInternalError(str(error)) from error
    return handle_of(PendingGroup(operations, tensors if in_place else None))


def group_names(kind: str, name: str | None, count: int) -> list[str]:
    """Returns the names of a group's members, "grouped_allreduce.<name>_1of3"; empty where the group has no name."""
    if not name:
        return [""] * count
    return [f"grouped_{kind}.{name}_{index}of{count}" for index in range(1, count + 1)]


def refuse(
    process_set: ProcessSet,
    kind: str,
    names: Sequence[str | None],
    reason: str,
    error: type[Exception] = ValueError,
) -> NoReturn:
    """Raises `error`, and fails the operation on the other ranks, which would wait for this rank otherwise.

    Args:
        names: the name that the user gave to a single operation, or the group_names() of a group.
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
