"""The collectives that return a handle at once, ``allreduce_async`` and its kin; ``synchronize(handle)`` waits.

Arguments are positional as in Horovod. Results carry no gradients; collectives.py has the forms that wait and do.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.operations.arguments import reduction, require_scatter, root_of, rows_of
from gossamer.horovod.torch.operations.handles import Handle, PendingSplits
from gossamer.horovod.torch.operations.submission import OPS, Average, group, group_names, one

__all__ = ["allreduce_async", "allreduce_async_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["allgather_async", "alltoall_async", "grouped_allgather_async"]
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
        op = reduction(op, average, name, process_set)
    scales: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return one("allreduce", tensor, name, process_set, op=op, **scales)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins ``allreduce_()``, with the arguments of ``allreduce_async()``.

    Do not touch the tensor before ``synchronize()``, which returns it.
    """
    if average is not None or op not in OPS:
        op = reduction(op, average, name, process_set)
    scales: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return one("allreduce", tensor, name, process_set, in_place=True, op=op, **scales)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins ``grouped_allreduce()``, without compression. ``synchronize()`` returns the list of new tensors."""
    op = reduction(op, average, name, process_set, members=len(tensors))
    scales: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return group("allreduce", tensors, name, process_set, op=op, **scales)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins ``grouped_allreduce_()``, with the arguments of ``grouped_allreduce_async()``.

    Do not touch the tensors before ``synchronize()``, which returns them.
    """
    op = reduction(op, average, name, process_set, members=len(tensors))
    scales: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return group("allreduce", tensors, name, process_set, in_place=True, op=op, **scales)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins ``allgather()``."""
    return one("allgather", tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins ``grouped_allgather()``."""
    return group("allgather", tensors, name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins ``broadcast()``. ``synchronize()`` returns the new tensor."""
    return one("broadcast", tensor, name, process_set, root=root_of(root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins ``broadcast_()``. Do not touch the tensor before ``synchronize()``, which returns it."""
    root = root_of(root_rank, name, process_set)
    return one("broadcast", tensor, name, process_set, in_place=True, root=root)


def alltoall_async(
    tensor: Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins ``alltoall()``. ``synchronize()`` returns the pair of tensors, with and without `splits`."""
    rows = rows_of(tensor, splits, name, process_set)
    if rows is not None:
        tensor = tensor[: sum(rows)]  # as in Horovod, splits may leave rows over
    return one("alltoall", tensor, name, process_set, pending=PendingSplits, splits=rows)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins ``reducescatter()``, without compression."""
    require_scatter([tensor], [name], op, process_set)
    scales: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return one("reducescatter", tensor, name, process_set, op=op, **scales)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins ``grouped_reducescatter()``, without compression."""
    require_scatter(tensors, group_names("reducescatter", name, len(tensors)), op, process_set)
    scales: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return group("reducescatter", tensors, name, process_set, op=op, **scales)
