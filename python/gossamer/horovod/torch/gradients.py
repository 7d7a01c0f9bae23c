# The autograd functions of the collectives that wait: forward and backward are both collectives, so every rank must run
# both. Used by collectives.py, and only for tensors that need gradients.
#
# As Horovod's: the backward of an allreduce is an allreduce with the same op and factors, which for Min, Max, Product
# and Adasum is no true gradient; the gradients that ranks hold for an allgather or broadcast are averaged, not summed.
"""Gradients of collectives."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gossamer.horovod.common import basics
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch import asynchronous
from gossamer.horovod.torch.arguments import reduce_op
from gossamer.horovod.torch.handles import synchronize
from gossamer.horovod.torch.submission import Average


class HorovodAllreduce(Function):
    """allreduce(tensor); the gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        average: Any,
        name: Any,
        op: Any,
        prescale: float,
        postscale: float,
        process_set: Any,
    ) -> Tensor:
        op = reduce_op(op, average)
        ctx.arguments = None, of_gradient(name), op, prescale, postscale, process_set
        return synchronize(
            asynchronous.allreduce_async(tensor, None, name, op, prescale, postscale, process_set)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return HorovodAllreduce.apply(gradients[0], *ctx.arguments), *[None] * 6


class HorovodGroupedAllreduce(Function):
    """grouped_allreduce(tensors); the gradients are reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        average: Any,
        name: Any,
        op: Any,
        prescale: float,
        postscale: float,
        process_set: Any,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        op = reduce_op(op, average)
        ctx.arguments = None, of_gradient(name), op, prescale, postscale, process_set
        handle = asynchronous.grouped_allreduce_async(
            tensors, None, name, op, prescale, postscale, process_set
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *[None] * 6, *HorovodGroupedAllreduce.apply(*ctx.arguments, *gradients)


class HorovodBroadcast(Function):
    """broadcast(tensor); the root gets the average of all ranks' gradients, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Any, process_set: ProcessSet) -> Tensor:
        ctx.name, ctx.process_set, ctx.root_rank = of_gradient(name), process_set, root_rank
        return synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduced = HorovodAllreduce.apply(gradients[0], None, ctx.name, Average, 1.0, 1.0, ctx.process_set)
        own = basics.rank() == ctx.root_rank
        return reduced if own else reduced * 0, None, None, None


class HorovodAlltoall(Function):
    """alltoall(tensor, splits); the gradients go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        handle = asynchronous.alltoall_async(tensor, splits, name, process_set)
        output, received_splits = synchronize(handle)
        ctx.name, ctx.process_set, ctx.rows = of_gradient(name), process_set, tensor.shape[0]
        ctx.received_splits = received_splits
        ctx.mark_non_differentiable(received_splits)
        return output, received_splits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, _ = HorovodAlltoall.apply(gradients[0], ctx.received_splits, ctx.name, ctx.process_set)
        kept = ctx.rows - gradient.shape[0]  # rows that no split sent
        if kept:
            gradient = torch.cat([gradient, gradient.new_zeros(kept, *gradient.shape[1:])])
        return gradient, None, None, None


def of_gradient(name: str | None) -> str | None:
    """Gradients of named operations are matched by name too, whatever order each rank's backward takes."""
    return f"{name}.grad" if name else None
