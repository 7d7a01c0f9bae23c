# The autograd functions of the collectives whose dimension 0 grows or shrinks: the backward of a gather takes this
# rank's rows, that of a scatter gathers. As gradients.py, where more is said.
"""Gradients of allgather and reducescatter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.torch import asynchronous
from gossamer.horovod.torch.gradients import HorovodAllreduce, HorovodGroupedAllreduce, of_gradient
from gossamer.horovod.torch.handles import synchronize
from gossamer.horovod.torch.submission import Average, Sum


class HorovodAllgather(Function):
    """allgather(tensor); the gradients of all ranks are averaged, and each rank takes its own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Any, process_set: ProcessSet) -> Tensor:
        ctx.name, ctx.process_set, ctx.rows = of_gradient(name), process_set, _rows(tensor)
        return synchronize(asynchronous.allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = _own_rows(gradients, [ctx.rows], ctx.name, ctx.process_set)[0]
        return gradient, None, None


class HorovodGroupedAllgather(Function):
    """grouped_allgather(tensors), with the gradients of HorovodAllgather."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name, ctx.process_set = of_gradient(name), process_set
        ctx.rows = [_rows(tensor) for tensor in tensors]
        return tuple(synchronize(asynchronous.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_own_rows(gradients, ctx.rows, ctx.name, ctx.process_set)


class HorovodReducescatter(Function):
    """reducescatter(tensor); the gradients are gathered, times the size of the set for Sum."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        name: Any,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
    ) -> Tensor:
        ctx.name, ctx.process_set = of_gradient(name), process_set
        ctx.factor = _factor(op, process_set, prescale, postscale)
        handle = asynchronous.reducescatter_async(tensor, name, op, process_set, prescale, postscale)
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = _scaled(gradients[0], ctx.factor)
        return HorovodAllgather.apply(scaled, ctx.name, ctx.process_set), *[None] * 5


class HorovodGroupedReducescatter(Function):
    """grouped_reducescatter(tensors), with the gradients of HorovodReducescatter."""

    @staticmethod
    def forward(
        ctx: Any,
        name: Any,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.name, ctx.process_set = of_gradient(name), process_set
        ctx.factor = _factor(op, process_set, prescale, postscale)
        handle = asynchronous.grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = [_scaled(gradient, ctx.factor) for gradient in gradients]
        return *[None] * 5, *HorovodGroupedAllgather.apply(ctx.name, ctx.process_set, *scaled)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _factor(op: int, process_set: ProcessSet, prescale: float, postscale: float) -> float:
    size = process_set.size() if op == Sum else 1
    assert size is not None
    return size * prescale * postscale


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1 else gradient * factor  # never in place: others may hold it


def _own_rows(
    gradients: Sequence[Tensor], rows: list[int], name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    """This rank's rows of the averages of gathered gradients. ``rows``: how many it gave to each gather."""
    counts = torch.tensor([rows])
    handle = asynchronous.allgather_async(counts, f"{name}.rows" if name else None, process_set)
    if len(gradients) == 1:
        averages = [HorovodAllreduce.apply(gradients[0], None, name, Average, 1.0, 1.0, process_set)]
    else:
        averages = list(HorovodGroupedAllreduce.apply(None, name, Average, 1.0, 1.0, process_set, *gradients))
    own = process_set.rank()
    starts = synchronize(handle)[:own].sum(0).tolist()
    return [
        average.narrow(0, start, count) for average, start, count in zip(averages, starts, rows, strict=True)
    ]
