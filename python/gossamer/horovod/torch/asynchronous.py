# The asynchronous forms of the collectives, with Horovod's positional arguments: each checks what only it knows and
# submits. The forms that wait are in collectives.py.
"""``allreduce_async`` and its kin: they return a handle for ``synchronize()``."""

from collections.abc import Sequence

import torch

from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.arguments import (
    group_reduction,
    reduction,
    require_scatter,
    root_of,
    rows_of,
)
from gossamer.horovod.torch.handles import Handle, PendingSplits
from gossamer.horovod.torch.submission import OPS, Average, group, group_names, one


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``allreduce()`` without waiting and without gradients: ``synchronize()`` gives the new tensor."""
    if average is not None or op not in OPS:
        op = reduction(op, average, name, process_set)
    return one(
        "allreduce", tensor, name, process_set, op=op, prescale=prescale_factor, postscale=postscale_factor
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``allreduce_()`` without waiting; the tensor must be left alone until ``synchronize()``, which gives it back."""
    if average is not None or op not in OPS:
        op = reduction(op, average, name, process_set)
    return one(
        "allreduce",
        tensor,
        name,
        process_set,
        in_place=True,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``grouped_allreduce()`` without waiting and without gradients: ``synchronize()`` gives the list."""
    op = group_reduction(op, average, name, process_set, count=len(tensors))
    return group(
        "allreduce", tensors, name, process_set, op=op, prescale=prescale_factor, postscale=postscale_factor
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``grouped_allreduce_()`` without waiting."""
    op = group_reduction(op, average, name, process_set, count=len(tensors))
    return group(
        "allreduce",
        tensors,
        name,
        process_set,
        op=op,
        in_place=True,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``allgather()`` without waiting and without gradients."""
    return one("allgather", tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``grouped_allgather()`` without waiting and without gradients."""
    return group("allgather", tensors, name, process_set)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``broadcast()`` without waiting and without gradients."""
    return one("broadcast", tensor, name, process_set, root=root_of(root_rank, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``broadcast_()`` without waiting; the tensor must be left alone until ``synchronize()``."""
    root = root_of(root_rank, name, process_set)
    return one("broadcast", tensor, name, process_set, in_place=True, root=root)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``alltoall()`` without waiting and without gradients: ``synchronize()`` gives the pair, whatever `splits`."""
    rows = rows_of(tensor, splits, name, process_set)
    if rows is not None:
        tensor = tensor[: sum(rows)]  # Horovod takes splits that leave rows over
    return one("alltoall", tensor, name, process_set, pending=PendingSplits, splits=rows)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """``reducescatter()`` without waiting and without gradients."""
    require_scatter([tensor], [name], op, process_set)
    return one(
        "reducescatter",
        tensor,
        name,
        process_set,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """``grouped_reducescatter()`` without waiting and without gradients."""
    require_scatter(tensors, group_names("reducescatter", name, len(tensors)), op, process_set)
    return group(
        "reducescatter",
        tensors,
        name,
        process_set,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )
