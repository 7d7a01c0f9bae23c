"""The autograd functions of the collectives that wait. Forward and backward are collectives, so every rank runs both.

Gradients are Horovod's. The backward of an allreduce is an allreduce with the same op and factors, which is no true
gradient for Min, Max, Product and Adasum. The backward of an allgather or broadcast averages the ranks' gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gossamer.horovod.common import basics
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch.operations import asynchronous
from gossamer.horovod.torch.operations.asynchronous import reduce_op
from gossamer.horovod.torch.operations.handles import synchronize
from gossamer.horovod.torch.operations.submission import Average, Sum

__all__ = ["HorovodAllreduce", "HorovodAlltoall", "HorovodBroadcast", "HorovodGroupedAllreduce"]
__all__ += ["HorovodAllgather", "HorovodGroupedAllgather"]
__all__ += ["HorovodGroupedReducescatter", "HorovodReducescatter"]


class HorovodAllreduce(Function):
    """allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *arguments: Any) -> Tensor:
        arguments, ctx.arguments = _reductions(*arguments)
        return synchronize(asynchronous.allreduce_async(tensor, *arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return HorovodAllreduce.apply(gradients[0], *ctx.arguments), *[None] * 6


class HorovodGroupedAllreduce(Function):
    """grouped_allreduce(tensors, ...), called with HorovodAllreduce's six arguments before the tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        arguments, ctx.arguments = _reductions(*inputs[:6])
        return tuple(synchronize(asynchronous.grouped_allreduce_async(inputs[6:], *arguments)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *[None] * 6, *HorovodGroupedAllreduce.apply(*ctx.arguments, *gradients)


class HorovodBroadcast(Function):
    """broadcast(tensor, root_rank, name, process_set). The root gets the ranks' average gradient, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Any, process_set: ProcessSet) -> Tensor:
        ctx.name, ctx.process_set, ctx.root_rank = _of_gradient(name), process_set, root_rank
        return synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduced = HorovodAllreduce.apply(gradients[0], *_average(ctx.name, ctx.process_set))
        own = basics.rank() == ctx.root_rank
        return reduced if own else reduced * 0, None, None, None


class HorovodAlltoall(Function):
    """alltoall(tensor, splits, name, process_set). Gradients go back to the ranks that sent the rows."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        output, ctx.received_splits = synchronize(
            asynchronous.alltoall_async(tensor, splits, name, process_set)
        )
        ctx.name, ctx.process_set, ctx.rows = _of_gradient(name), process_set, tensor.shape[0]
        ctx.mark_non_differentiable(ctx.received_splits)
        return output, ctx.received_splits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, _ = HorovodAlltoall.apply(gradients[0], ctx.received_splits, ctx.name, ctx.process_set)
        kept = ctx.rows - gradient.shape[0]  # rows that no split sent
        if kept:
            gradient = torch.cat([gradient, gradient.new_zeros(kept, *gradient.shape[1:])])
        return gradient, None, None, None


class HorovodAllgather(Function):
    """allgather(tensor, name, process_set). Gradients are averaged over the ranks, and each rank takes its own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Any, process_set: ProcessSet) -> Tensor:
        ctx.name, ctx.process_set, ctx.rows = _of_gradient(name), process_set, _rows(tensor)
        return synchronize(asynchronous.allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *_own_rows(gradients, [ctx.rows], ctx.name, ctx.process_set), None, None


class HorovodGroupedAllgather(Function):
    """grouped_allgather(tensors, name, process_set), called with the tensors last; gradients as of HorovodAllgather."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name, ctx.process_set = _of_gradient(name), process_set
        ctx.rows = [_rows(tensor) for tensor in tensors]
        return tuple(synchronize(asynchronous.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_own_rows(gradients, ctx.rows, ctx.name, ctx.process_set)


class HorovodReducescatter(Function):
    """reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor).

    Gradients are gathered; for Sum they are multiplied by the size of the set.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *arguments: Any) -> Tensor:
        _remember_scatter(ctx, *arguments)
        return synchronize(asynchronous.reducescatter_async(tensor, *arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = _scaled(gradients[0], ctx.factor)
        return HorovodAllgather.apply(scaled, ctx.name, ctx.process_set), *[None] * 5


class HorovodGroupedReducescatter(Function):
    """grouped_reducescatter(tensors, ...), called with HorovodReducescatter's five arguments before the tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        _remember_scatter(ctx, *inputs[:5])
        return tuple(synchronize(asynchronous.grouped_reducescatter_async(inputs[5:], *inputs[:5])))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = [_scaled(gradient, ctx.factor) for gradient in gradients]
        return *[None] * 5, *HorovodGroupedAllgather.apply(ctx.name, ctx.process_set, *scaled)


def _of_gradient(name: str | None) -> str | None:
    """A name for the gradient of a named operation, because each rank's backward may take another order."""
    return f"{name}.grad" if name else None


def _reductions(average: Any, name: Any, op: Any, *others: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of an allreduce in forward and in backward, without the deprecated `average`."""
    op = reduce_op(op, average)
    return (None, name, op, *others), (None, _of_gradient(name), op, *others)


def _average(name: str | None, process_set: ProcessSet) -> tuple[Any, ...]:
    return None, name, Average, 1.0, 1.0, process_set


def _remember_scatter(
    ctx: Any, name: Any, op: int, process_set: ProcessSet, prescale: float, postscale: float
) -> None:
    size = process_set.size() if op == Sum else 1
    assert size is not None
    ctx.name, ctx.process_set, ctx.factor = _of_gradient(name), process_set, size * prescale * postscale


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1 else gradient * factor  # never in place: others may hold it


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _own_rows(
    gradients: Sequence[Tensor], rows: list[int], name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    """This rank's rows of the averages of gathered gradients. ``rows``: how many rows it gave to each gather."""
    counts = torch.tensor([rows])
    handle = asynchronous.allgather_async(counts, f"{name}.rows" if name else None, process_set)
    if len(gradients) == 1:
        averages = [HorovodAllreduce.apply(gradients[0], *_average(name, process_set))]
    else:
        averages = list(HorovodGroupedAllreduce.apply(*_average(name, process_set), *gradients))
    own = process_set.rank()
    starts = synchronize(handle)[:own].sum(0).tolist()
    return [
        average.narrow(0, start, count) for average, start, count in zip(averages, starts, rows, strict=True)
    ]
