"""Checks and translation of the collectives' arguments: the reduction, the root, the splits.

Only what the native core cannot see is checked here. A wrong argument fails the operation on the other ranks too.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch.operations.submission import OPS, PACKAGES, Average, Sum, group_names, refuse


def reduce_op(op: int | None, average: bool | None) -> int:
    """Returns `op`, or what the deprecated `average` means. Raises ValueError if both are given."""
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


def reduction(
    op: int | None,
    average: bool | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    members: int | None = None,
) -> int:
    """Returns the op of an allreduce, or of a group with so many members. Raises ValueError for an unknown op."""
    chosen = reduce_op(op, average)
    if chosen not in OPS:
        names = [name] if members is None else group_names("allreduce", name, members)
        refuse(process_set, "allreduce", names, f"op must be one of {OPS}, got {chosen!r}")
    return chosen


def root_of(root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    """Returns the root's rank within the set. Raises ValueError if the root is no member."""
    process_set.native()
    try:
        return process_set.root(root_rank)
    except ValueError as error:
        refuse(process_set, "broadcast", [name], str(error))


def require_scatter(
    tensors: Sequence[Any], names: Sequence[str | None], op: int, process_set: ProcessSet
) -> None:
    """Raises HorovodInternalError for an op that reducescatter does not have, as Horovod; ValueError for a scalar."""
    if op not in (Average, Sum):
        reason = f"op must be Average or Sum, got {OPS.get(op, op)}"
        refuse(process_set, "reducescatter", names, reason, HorovodInternalError)
    if any(isinstance(tensor, torch.Tensor) and tensor.dim() == 0 for tensor in tensors):
        reason = "a tensor must have a dimension to scatter, got a scalar"
        refuse(process_set, "reducescatter", names, reason)


def rows_of(
    tensor: Any, splits: torch.Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> list[int] | None:
    """Returns how many rows an alltoall sends to each rank; None for equal parts.

    Raises ValueError if the splits, or equal parts, do not fit the tensor and the number of ranks.
    """
    size = process_set.native().size
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        return None  # submission.py or the native core refuses it
    rows = tensor.shape[0]
    given: list[int] | None = None
    wrong = ""
    if splits is None or len(splits) == 0:
        if rows % size:
            wrong = f"without splits, dimension 0 must be divisible by the {size} ranks, got {rows}"
    elif isinstance(splits, torch.Tensor) and (
        splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64)
    ):
        shape = list(splits.shape)
        wrong = f"splits must be 1-dimensional int32 or int64, got {splits.dtype} of shape {shape}"
    else:
        given = splits.tolist() if isinstance(splits, torch.Tensor) else [int(split) for split in splits]
        if len(given) != size or min(given) < 0 or sum(given) > rows:
            what = f"{size} numbers from 0, one a rank, with a sum of at most {rows}"
            wrong = f"splits must be {what}, got {given}"
    if wrong:
        refuse(process_set, "alltoall", [name], wrong)
    return given
