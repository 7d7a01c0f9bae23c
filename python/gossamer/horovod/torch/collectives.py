# The collectives that wait, with Horovod's positional arguments: the asynchronous form and synchronize(), through an
# autograd function where a gradient is needed. Every rank of the process set must call them.
"""``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter`` and their grouped and in-place forms."""

from collections.abc import Sequence
from typing import Any

import torch

from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch import asynchronous, gradients, gradients_of_rows
from gossamer.horovod.torch.compression import Compression
from gossamer.horovod.torch.handles import synchronize
from gossamer.horovod.torch.submission import Average


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensors of all ranks reduced, as a new tensor; shapes and dtypes must be equal.

    ``op``: Average (default), Sum, Adasum, Min, Max or Product. The tensors are multiplied by ``prescale_factor``
    before, the result by ``postscale_factor``; integers in float64, then truncated. ``name``: operations are matched by
    it, whatever order ranks call them in; without one, by the order of calls. The gradient is reduced in the same way.
    """
    compressed, context = compression.compress(tensor)
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    if _needs_gradient(compressed):
        reduced = gradients.HorovodAllreduce.apply(compressed, *arguments)
    else:
        reduced = synchronize(asynchronous.allreduce_async(compressed, *arguments))
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``allreduce()`` in place, of any strides; returns the tensor. Has no gradient."""
    return synchronize(
        asynchronous.allreduce_async_(
            tensor, average, name, op, prescale_factor, postscale_factor, process_set
        )
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``allreduce()`` of several tensors that complete or fail together; a list of new tensors."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    inputs = [tensor for tensor, _ in compressed]
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    if _needs_gradient(*inputs):
        reduced = gradients.HorovodGroupedAllreduce.apply(*arguments, *inputs)
    else:
        reduced = synchronize(asynchronous.grouped_allreduce_async(inputs, *arguments))
    pairs = zip(reduced, compressed, strict=True)
    return [compression.decompress(tensor, context) for tensor, (_, context) in pairs]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``grouped_allreduce()`` in place; returns the tensors. Has no gradient."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(asynchronous.grouped_allreduce_async_(tensors, *arguments))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, in rank order along dimension 0, which alone may differ between ranks."""
    if _needs_gradient(tensor):
        return gradients_of_rows.HorovodAllgather.apply(tensor, name, process_set)
    return synchronize(asynchronous.allgather_async(tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """``allgather()`` of several tensors that complete or fail together; a list."""
    if _needs_gradient(*tensors):
        return list(gradients_of_rows.HorovodGroupedAllgather.apply(name, process_set, *tensors))
    return synchronize(asynchronous.grouped_allgather_async(tensors, name, process_set))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of ``root_rank``, which is a global rank within any process set, as a new tensor."""
    if _needs_gradient(tensor):
        return gradients.HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``broadcast()`` in place, of any strides; returns the tensor. Has no gradient."""
    return synchronize(asynchronous.broadcast_async_(tensor, root_rank, name, process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends ``splits[i]`` rows to rank i of the set, in a row, and gets what the others send; in rank order.

    ``splits``: a list or 1-dimensional int32 or int64 tensor with a number for each rank; None for equal parts. With
    ``splits``, the result is a pair: the tensor, and an int32 tensor of how many rows came from each rank.
    """
    if _needs_gradient(tensor):
        output, received_splits = gradients.HorovodAlltoall.apply(tensor, splits, name, process_set)
    else:
        output, received_splits = synchronize(asynchronous.alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received_splits)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's part of the tensors of all ranks reduced. ``op``: Average or Sum.

    Dimension 0 is divided; of a remainder, each of the first ranks gets one more row.
    """
    compressed, context = compression.compress(tensor)
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    if _needs_gradient(compressed):
        reduced = gradients_of_rows.HorovodReducescatter.apply(compressed, *arguments)
    else:
        reduced = synchronize(asynchronous.reducescatter_async(compressed, *arguments))
    return compression.decompress(reduced, context)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """``reducescatter()`` of several tensors that complete or fail together; a list."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    inputs = [tensor for tensor, _ in compressed]
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    if _needs_gradient(*inputs):
        reduced = gradients_of_rows.HorovodGroupedReducescatter.apply(*arguments, *inputs)
    else:
        reduced = synchronize(asynchronous.grouped_reducescatter_async(inputs, *arguments))
    pairs = zip(reduced, compressed, strict=True)
    return [compression.decompress(tensor, context) for tensor, (_, context) in pairs]
