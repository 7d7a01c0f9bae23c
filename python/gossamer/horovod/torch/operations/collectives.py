"""The collectives that wait: ``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter`` and forms.

Arguments are positional as in Horovod. Every rank of the process set must make the same calls. Each function is the
asynchronous form followed by ``synchronize()``; where a tensor needs a gradient, an autograd function does that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.compression import Compression
from gossamer.horovod.torch.operations import asynchronous, gradients
from gossamer.horovod.torch.operations.handles import Handle, synchronize
from gossamer.horovod.torch.operations.signatures import takes_arguments_of, takes_group_and_arguments_of
from gossamer.horovod.torch.operations.submission import Average, Group, grouped

__all__ = ["allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_"]
__all__ += ["grouped_reducescatter", "reducescatter"]
__all__ += ["allgather", "alltoall", "broadcast", "broadcast_", "grouped_allgather"]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces the tensors of all ranks, and returns the result as a new tensor. Its gradient is reduced likewise.

    Args:
        tensor: equal in shape and dtype on all ranks.
        average: deprecated; use op.
        name: operations are matched by name, in whatever order ranks call them; without a name by the order of calls.
        compression: one of hvd.Compression, or an object with compress() and decompress().
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the tensors before the reduction; integers in float64, then truncated.
        postscale_factor: multiplies the result likewise.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: on every rank, if the operation failed, such as for unlike shapes.
        ValueError: an argument of this rank is wrong; the operation fails on the other ranks.
    """
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    functions = gradients.HorovodAllreduce, gradients.HorovodGroupedAllreduce
    return _reduce(tensor, compression, asynchronous.allreduce_async, functions, arguments)


@takes_arguments_of(asynchronous.allreduce_async)
def allreduce_(*arguments: Any, **named: Any) -> Tensor:
    """Does ``allreduce()`` in place, for any strides, without compression or gradient. Returns the tensor."""
    return synchronize(asynchronous.allreduce_async_(*arguments, **named))


@takes_group_and_arguments_of(allreduce)
def grouped_allreduce(tensors: Sequence[Tensor], *arguments: Any, **named: Any) -> list[Tensor]:
    """Does ``allreduce()`` of several tensors, which complete or fail together. Returns a list of new tensors."""
    return list(allreduce(grouped(tensors), *arguments, **named))


@takes_arguments_of(asynchronous.grouped_allreduce_async)
def grouped_allreduce_(*arguments: Any, **named: Any) -> list[Tensor]:
    """Does ``grouped_allreduce()`` in place, without compression or gradient. Returns the tensors."""
    return synchronize(asynchronous.grouped_allreduce_async_(*arguments, **named))


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the tensors of all ranks one after the other along dimension 0, which alone may differ between ranks."""
    if _needs_gradient(tensor):
        return gradients.HorovodAllgather.apply(tensor, name, process_set)
    return synchronize(asynchronous.allgather_async(tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Does ``allgather()`` of several tensors, which complete or fail together. Returns a list."""
    if _needs_gradient(*tensors):
        return list(gradients.HorovodGroupedAllgather.apply(name, process_set, *tensors))
    return synchronize(asynchronous.grouped_allgather_async(tensors, name, process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the tensor of ``root_rank`` as a new tensor. The root is a global rank, within any process set."""
    if _needs_gradient(tensor):
        return gradients.HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set))


@takes_arguments_of(asynchronous.broadcast_async_)
def broadcast_(*arguments: Any, **named: Any) -> Tensor:
    """Does ``broadcast()`` in place, with its arguments, for any strides, without gradient. Returns the tensor."""
    return synchronize(asynchronous.broadcast_async_(*arguments, **named))


def alltoall(
    tensor: Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends ``splits[i]`` consecutive rows to rank i of the set; returns the rows of the others in rank order.

    Args:
        splits: a list, or a 1-dimensional int32 or int64 tensor, with one number for each rank. None for equal parts.

    Returns:
        The received rows. With ``splits`` a pair: the rows, and the number of rows from each rank as an int32 tensor.
    """
    if _needs_gradient(tensor):
        output, received_splits = gradients.HorovodAlltoall.apply(tensor, splits, name, process_set)
    else:
        output, received_splits = synchronize(asynchronous.alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received_splits)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces the tensors of all ranks, and returns this rank's rows of the result. ``op``: Average or Sum.

    Dimension 0 is divided among the ranks. Where that leaves a remainder, each of the first ranks gets one row more.
    """
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    functions = gradients.HorovodReducescatter, gradients.HorovodGroupedReducescatter
    return _reduce(tensor, compression, asynchronous.reducescatter_async, functions, arguments)


@takes_group_and_arguments_of(reducescatter)
def grouped_reducescatter(tensors: Sequence[Tensor], *arguments: Any, **named: Any) -> list[Tensor]:
    """Does ``reducescatter()`` of several tensors, which complete or fail together. Returns a list."""
    return list(reducescatter(grouped(tensors), *arguments, **named))


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def _reduce(
    tensor: Any,
    compression: Any,
    submit: Callable[..., Handle],
    functions: tuple[Any, Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Reduces a tensor or a Group. ``functions``: the autograd functions of both, for tensors that need a gradient."""
    if isinstance(tensor, Group):
        compressed = [compression.compress(each) for each in tensor]
        parts = Group(part for part, _ in compressed)
        with_gradient = _needs_gradient(*parts)
        reduced = (
            functions[1].apply(*arguments, *parts)
            if with_gradient
            else synchronize(submit(parts, *arguments))
        )
        pairs = zip(reduced, compressed, strict=True)
        return [compression.decompress(each, context) for each, (_, context) in pairs]
    sent, context = compression.compress(tensor)
    if _needs_gradient(sent):
        return compression.decompress(functions[0].apply(sent, *arguments), context)
    return compression.decompress(synchronize(submit(sent, *arguments)), context)
