"""Collectives that autograd goes through."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.bagua.torch_api.process_group import torch_group_of
from gossamer.bagua.torch_api.transfer import ReduceOp
from gossamer.errors import ConfigError


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Tensor:
    """Returns a new tensor, the sum or maximum over the ranks. Backward sums all ranks' gradients. Both are collective.

    Every element that equals the maximum gets the gradient, also if there are several.

    Args:
        op: SUM or MAX, of torch.distributed.ReduceOp or Bagua's.
        group: a group of torch or Bagua; None: all workers.

    Raises:
        ConfigError: another op; this rank is not in the group.
    """
    sum_or_max = (name for name in ("SUM", "MAX") if op == getattr(dist.ReduceOp, name))
    # Bagua's operations are numbers, which torch's, of other numbers, say they equal.
    name = op.name if isinstance(op, ReduceOp) else next(sum_or_max, None)
    if name not in ("SUM", "MAX"):
        raise ConfigError(f"all_reduce: op must be SUM or MAX, got {op!r}")
    result: Tensor = _AllReduce.apply(tensor, name, torch_group_of("all_reduce", group))
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str, group: Any) -> Tensor:
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, getattr(dist.ReduceOp, name), group=group)
        ctx.group, ctx.is_maximum = group, name == "MAX"
        if ctx.is_maximum:
            ctx.save_for_backward(tensor, reduced)
        return reduced

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total: Tensor = _AllReduce.apply(gradients[0], "SUM", ctx.group)
        if ctx.is_maximum:
            tensor, reduced = ctx.saved_tensors
            total = total * (tensor == reduced)
        return total, None, None
