"""Reductions and gathers of single tensors, as in Lightning 1.7. distributed.py exports the public names.

Differences from Lightning: reduce_op=None is the sum, as documented; every letter case and numbers are accepted; a mean
does not change its input; groups without rank 0 have right gradients; different shapes are an error on every rank.
docs/lightning.md has a table.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gossamer.errors import ConfigError

_OPERATIONS = ("sum", "product", "min", "max", "band", "bor", "bxor")
_DTYPES = sorted(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype))
_MOST_DIMENSIONS = 64  # of a torch tensor


def sync_ddp(result: Any, group: Any = None, reduce_op: Any = None, *, inplace: bool = False) -> Tensor:
    """Return the reduction of a tensor or number over the ranks of a group. Collective.

    A mean is a new tensor; the mean of integers and booleans is a float. All other reductions change `result` in place,
    and return it.

    Args:
        result: a tensor with any strides, or a number.
        group: a process group; None: all ranks.
        reduce_op: "mean" or "avg", "sum", "product", "min", "max", "band", "bor", "bxor" in any letter case; a
            torch.distributed.ReduceOp; or None, the sum.
        inplace: a mean changes `result` in place too, as in Lightning 2.1 and later.

    Raises:
        ConfigError: torch.distributed is not initialised, this rank is not in the group, the reduction is unknown, or
            the mean of integers shall be in place.
    """
    size = _size("sync_ddp", group)
    operation = _operation(reduce_op)
    tensor = result if isinstance(result, Tensor) else torch.tensor(result)
    if operation is not None:
        _all_reduce(tensor, operation, group)
        return tensor
    is_integral = not (tensor.is_floating_point() or tensor.is_complex())
    if inplace and is_integral:
        raise ConfigError(
            f"sync_ddp: inplace=True needs a floating-point tensor, because the mean of integers is a float, got "
            f"{tensor.dtype}; use the tensor that is returned without it"
        )
    total = tensor if inplace else tensor.to(torch.int64, copy=True) if is_integral else tensor.clone()
    _all_reduce(total, dist.ReduceOp.SUM, group)
    if not inplace:
        return total / size
    with torch.no_grad():
        return tensor.div_(size)


def sync_ddp_if_available(
    result: Any, group: Any = None, reduce_op: Any = None, *, inplace: bool = False
) -> Any:
    """Return sync_ddp(), or `result` itself if torch.distributed is not initialised."""
    return sync_ddp(result, group, reduce_op, inplace=inplace) if dist.is_initialized() else result


def reduce(tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
    """Reduce a tensor by sync_ddp(), in place if its dtype can hold the result. Return anything else unchanged."""
    if not isinstance(tensor, Tensor):
        return tensor
    inplace = tensor.is_floating_point() or tensor.is_complex()
    with torch.no_grad():
        return sync_ddp_if_available(tensor, group, reduce_op, inplace=inplace)


def gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
    """Return every rank's tensor, in rank order, without gradients. Collective.

    Each result is contiguous and has its own memory. Shapes may differ between ranks, but not the number of dimensions.

    Raises:
        ConfigError: on every rank, if dtypes or numbers of dimensions differ; torch.distributed is not initialised.
    """
    _size("gather_all_tensors", group)
    flat = result.detach().contiguous().view(-1)
    shapes = _shapes("gather_all_tensors", result, group)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    padded = flat.new_zeros(max(sizes))
    padded[: flat.numel()] = flat
    parts = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(parts, padded, group=group)
    return [
        part if size == padded.numel() and part.shape == tuple(shape) else part[:size].clone().view(shape)
        for part, size, shape in zip(parts, sizes, shapes, strict=True)
    ]


class AllGatherGrad(torch.autograd.Function):
    """apply(tensor, group=None) returns [size, *shape]: the tensors of all ranks, which have equal shapes.

    Backward returns the sum of all ranks' gradients for this rank's tensor. That is the derivative of the sum of the
    losses of all ranks. Forward and backward are collective.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any = None) -> Tensor:
        """Stack the tensors in rank order. Raise ConfigError on every rank if shapes or dtypes differ."""
        size = _size("all_gather", group)
        shapes = _shapes("all_gather", tensor, group)
        if any(shape != shapes[0] for shape in shapes):
            raise ConfigError(
                f"all_gather: tensors must have one shape on all ranks, got {shapes}; gather_all_tensors() takes others"
            )
        ctx.group = group
        own = tensor.detach().contiguous()
        gathered = own.new_empty(size, *own.shape)
        dist.all_gather(list(gathered.unbind()), own, group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        """Return the sum over the ranks of the gradients of this rank's row."""
        gradient = grad_output[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


def all_gather_ddp_if_available(tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
    """Return [size, *shape], every rank's tensor; `tensor` itself if torch.distributed is not initialised.

    Collective.

    Args:
        sync_grads: backward sends gradients back to the ranks, and sums them. False: the result has no gradient.

    Raises:
        ConfigError: on every rank, if shapes or dtypes differ.
    """
    if not dist.is_initialized():
        return tensor
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        return AllGatherGrad.apply(tensor, group)


def _operation(reduce_op: Any) -> Any:
    """Return a torch.distributed.ReduceOp; None for the mean."""
    if reduce_op is None:
        return dist.ReduceOp.SUM
    if not isinstance(reduce_op, str):
        return None if reduce_op == dist.ReduceOp.AVG else reduce_op
    name = reduce_op.lower()
    if name in ("mean", "avg"):
        return None
    if name not in _OPERATIONS:
        known = ", ".join(("mean", "avg", *_OPERATIONS))
        raise ConfigError(
            f"sync_ddp: reduce_op must be one of {known}, a torch.distributed.ReduceOp or None, got {reduce_op!r}"
        )
    return getattr(dist.ReduceOp, name.upper())


def _all_reduce(tensor: Tensor, operation: Any, group: Any) -> None:
    """All-reduce in place, with any strides, unseen by autograd."""
    own = tensor.detach()
    flat = own.contiguous()
    dist.all_reduce(flat, operation, group=group)
    if flat.data_ptr() != own.data_ptr():
        own.copy_(flat)


def _size(what: str, group: Any) -> int:
    if not dist.is_initialized():
        raise ConfigError(f"{what}: the default process group has not been initialized")
    if dist.get_rank(group) < 0:
        raise ConfigError(f"{what}: rank {dist.get_rank()} is not in the group that was given")
    return dist.get_world_size(group)


def _shapes(what: str, tensor: Tensor, group: Any) -> list[list[int]]:
    """Return every rank's shape. Raise ConfigError on every rank if dtypes or numbers of dimensions differ."""
    own = torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64)
    own[:2] = torch.tensor([_DTYPES.index(str(tensor.dtype)), tensor.ndim])
    own[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
    own = own.to(tensor.device)
    every = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(every.unbind()), own, group=group)
    kinds = [(_DTYPES[dtype], ndim) for dtype, ndim, *_ in every.tolist()]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"{what}: tensors must have one dtype and number of dimensions on all ranks, got {kinds}"
        )
    return [row[2 : 2 + tensor.ndim] for row in every.tolist()]
