# What Horovod's arguments mean, and which of them cannot work: the reduction, the root, the splits. Checked here is
# only what the native core could not tell; whatever fails, fails on the other ranks too.
"""Checks and translation of the collectives' arguments."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch.submission import OPS, PACKAGES, Average, Sum, group_names, refuse


def reduce_op(op: int | None, average: bool | None) -> int:
    """`op`, or what the deprecated `average` means. ValueError for both."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError(f"hvd: op or average must be given, not both, got op={op} and average={average}")
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame, depth = frame.f_back, depth + 1
    text = "hvd: average is deprecated; use op=hvd.Average or op=hvd.Sum"
    warnings.warn(text, DeprecationWarning, stacklevel=depth)
    return Average if average else Sum


def reduction(op: int | None, average: bool | None, name: str | None, process_set: ProcessSet) -> int:
    """The op of an allreduce. ValueError if there is none of that number."""
    chosen = reduce_op(op, average)
    if chosen not in OPS:
        refuse(process_set, "allreduce", [name], f"op must be one of {OPS}, got {chosen!r}")
    return chosen


def group_reduction(
    op: int | None, average: bool | None, name: str | None, process_set: ProcessSet, *, count: int
) -> int:
    """The same of a group."""
    chosen = reduce_op(op, average)
    if chosen not in OPS:
        names = group_names("allreduce", name, count)
        refuse(process_set, "allreduce", names, f"op must be one of {OPS}, got {chosen!r}")
    return chosen


def root_of(root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    """The root's rank in the set. ValueError if it is no member."""
    process_set.native()
    try:
        return process_set.root(root_rank)
    except ValueError as error:
        refuse(process_set, "broadcast", [name], str(error))


def require_scatter(
    tensors: Sequence[Any], names: Sequence[str | None], op: int, process_set: ProcessSet
) -> None:
    """Of a reducescatter. HorovodInternalError, as Horovod's, for another op; ValueError for a scalar."""
    if op not in (Average, Sum):
        reason = f"op must be Average or Sum, got {OPS.get(op, op)}"
        refuse(process_set, "reducescatter", names, reason, HorovodInternalError)
    if any(isinstance(tensor, torch.Tensor) and tensor.dim() == 0 for tensor in tensors):
        reason = "a tensor must have a dimension to scatter, got a scalar"
        refuse(process_set, "reducescatter", names, reason)


def rows_of(
    tensor: Any, splits: torch.Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> list[int] | None:
    """How many rows an alltoall sends to each rank; None for equal parts. ValueError if that cannot be."""
    size = process_set.native().size
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        return None  # submitting it is an error already
    rows = tensor.shape[0]
    wrong = None
    given: list[int] | None = None
    if splits is None or len(splits) == 0:
        if rows % size:
            wrong = f"without splits, dimension 0 must be divisible by the {size} ranks, got {rows}"
    elif isinstance(splits, torch.Tensor) and (
        splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64)
    ):
        wrong = (
            f"splits must be 1-dimensional int32 or int64, got {splits.dtype} of shape {list(splits.shape)}"
        )
    else:
        given = splits.tolist() if isinstance(splits, torch.Tensor) else [int(split) for split in splits]
        if len(given) != size or min(given) < 0 or sum(given) > rows:
            wrong = (
                f"splits must be {size} numbers from 0, one a rank, with a sum of at most {rows}, got {given}"
            )
    if wrong is not None:
        refuse(process_set, "alltoall", [name], wrong)
    return given
