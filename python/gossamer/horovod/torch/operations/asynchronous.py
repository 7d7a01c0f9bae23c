"""The collectives that return a handle at once, ``allreduce_async`` and its kin; ``synchronize(handle)`` waits.

Arguments are positional as in Horovod. Results carry no gradients; collectives.py has the forms that wait and do.
Only what the native core cannot see is checked here. A wrong argument fails the operation on the other ranks too.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.operations.handles import Handle, synchronize
from gossamer.horovod.torch.operations.signatures import takes_group_and_arguments_of
from gossamer.horovod.torch.operations.submission import (
    OPS,
    Average,
    Group,
    Sum,
    grouped,
    names_of,
    refuse,
    submit,
)
from gossamer.observe.stall import PACKAGES

__all__ = ["allreduce_async", "allreduce_async_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["allgather_async", "alltoall_async", "grouped_allgather_async", "sparse_allreduce_async"]
__all__ += ["broadcast_async", "broadcast_async_"]
__all__ += ["grouped_reducescatter_async", "reducescatter_async"]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins ``allreduce()``, without compression. ``synchronize()`` returns the new tensor."""
    if average is not None or op not in OPS:
        op = _known_op(tensor, op, average, name, process_set)
    return submit("allreduce", tensor, name, process_set, op, prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins ``allreduce_()``. Do not touch the tensor before ``synchronize()``, which returns it."""
    if average is not None or op not in OPS:
        op = _known_op(tensor, op, average, name, process_set)
    return submit(
        "allreduce", tensor, name, process_set, op, prescale_factor, postscale_factor, in_place=True
    )


@takes_group_and_arguments_of(allreduce_async)
def grouped_allreduce_async(tensors: Sequence[Tensor], *arguments: Any, **named: Any) -> Handle:
    """Begins ``grouped_allreduce()``, without compression. ``synchronize()`` returns the list of new tensors."""
    return allreduce_async(grouped(tensors), *arguments, **named)


@takes_group_and_arguments_of(allreduce_async)
def grouped_allreduce_async_(tensors: Sequence[Tensor], *arguments: Any, **named: Any) -> Handle:
    """Begins ``grouped_allreduce_()``. Do not touch the tensors before ``synchronize()``, which returns them."""
    return allreduce_async_(grouped(tensors), *arguments, **named)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins ``allgather()``."""
    return submit("allgather", tensor, name, process_set)


@takes_group_and_arguments_of(allgather_async)
def grouped_allgather_async(tensors: Sequence[Tensor], *arguments: Any, **named: Any) -> Handle:
    """Begins ``grouped_allgather()``."""
    return allgather_async(grouped(tensors), *arguments, **named)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins ``broadcast()``. ``synchronize()`` returns the new tensor."""
    return submit("broadcast", tensor, name, process_set, root=_root_of(root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins ``broadcast_()``. Do not touch the tensor before ``synchronize()``, which returns it."""
    root = _root_of(root_rank, name, process_set)
    return submit("broadcast", tensor, name, process_set, in_place=True, root=root)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins ``alltoall()``. ``synchronize()`` returns the pair of tensors, with and without `splits`."""
    rows = _rows_of(tensor, splits, name, process_set)
    if rows is not None:
        tensor = tensor[: sum(rows)]  # as in Horovod, splits may leave rows over
    return submit("alltoall", tensor, name, process_set, splits=rows)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins ``reducescatter()``, without compression."""
    _require_scatter(tensor, op, name, process_set)
    return submit("reducescatter", tensor, name, process_set, op, prescale_factor, postscale_factor)


@takes_group_and_arguments_of(reducescatter_async)
def grouped_reducescatter_async(tensors: Sequence[Tensor], *arguments: Any, **named: Any) -> Handle:
    """Begins ``grouped_reducescatter()``, without compression."""
    return reducescatter_async(grouped(tensors), *arguments, **named)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begins to reduce a sparse COO tensor. Returns a function that waits and returns the sparse result.

    Repeated indices mean their sum. The result is not coalesced: it has an index of several ranks several times.

    Args:
        op: Average or Sum.

    Raises:
        ValueError: the tensor is not sparse COO, or op is another one.
    """
    native = process_set.native()
    names = [f"{name}.indices" if name else None, f"{name}.values" if name else None]
    sparse = isinstance(tensor, Tensor) and tensor.layout == torch.sparse_coo
    if not sparse or op not in (Average, Sum):
        shown = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        reason = f"needs a sparse COO tensor and op Average or Sum, got {shown} and {OPS.get(op, op)}"
        refuse(process_set, "allgather", names, reason)
    tensor = tensor.detach()
    indices = allgather_async(tensor._indices().t(), names[0], process_set)
    values = allgather_async(tensor._values(), names[1], process_set)

    def wait() -> Tensor:
        all_indices, all_values = synchronize(indices).t(), synchronize(values)
        if op == Average:
            all_values = all_values / native.size
        return torch.sparse_coo_tensor(all_indices, all_values, tensor.size(), check_invariants=False)

    return wait


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


def _known_op(
    tensor: Any, op: int | None, average: bool | None, name: str | None, process_set: ProcessSet
) -> int:
    """Returns the op of an allreduce. Raises ValueError for an unknown op."""
    chosen = reduce_op(op, average)
    if chosen not in OPS:
        names = names_of("allreduce", tensor, name)
        refuse(process_set, "allreduce", names, f"op must be one of {OPS}, got {chosen!r}")
    return chosen


def _root_of(root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    """Returns the root's rank within the set. Raises ValueError if the root is no member."""
    process_set.native()
    try:
        return process_set.root(root_rank)
    except ValueError as error:
        refuse(process_set, "broadcast", [name], str(error))


def _require_scatter(tensor: Any, op: int, name: str | None, process_set: ProcessSet) -> None:
    """Raises HorovodInternalError for an op that reducescatter does not have, as Horovod; ValueError for a scalar."""
    names = names_of("reducescatter", tensor, name)
    if op not in (Average, Sum):
        reason = f"op must be Average or Sum, got {OPS.get(op, op)}"
        refuse(process_set, "reducescatter", names, reason, HorovodInternalError)
    for each in tensor if isinstance(tensor, Group) else [tensor]:
        if isinstance(each, Tensor) and each.dim() == 0:
            reason = "a tensor must have a dimension to scatter, got a scalar"
            refuse(process_set, "reducescatter", names, reason)


def _rows_of(
    tensor: Any, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> list[int] | None:
    """Returns how many rows an alltoall sends to each rank; None for equal parts.

    Raises ValueError if the splits, or equal parts, do not fit the tensor and the number of ranks.
    """
    size = process_set.native().size
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return None  # submission.py or the native core refuses it
    rows = tensor.shape[0]
    given: list[int] | None = None
    wrong = ""
    if splits is None or len(splits) == 0:
        if rows % size:
            wrong = f"without splits, dimension 0 must be divisible by the {size} ranks, got {rows}"
    elif isinstance(splits, Tensor) and (splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64)):
        shape = list(splits.shape)
        wrong = f"splits must be 1-dimensional int32 or int64, got {splits.dtype} of shape {shape}"
    else:
        given = splits.tolist() if isinstance(splits, Tensor) else [int(split) for split in splits]
        if len(given) != size or min(given) < 0 or sum(given) > rows:
            what = f"{size} numbers from 0, one a rank, with a sum of at most {rows}"
            wrong = f"splits must be {what}, got {given}"
    if wrong:
        refuse(process_set, "alltoall", [name], wrong)
    return given
