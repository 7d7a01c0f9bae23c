"""HorovodStrategy's reduce() and all_gather(), over hvd. Called by horovod.py once hvd.init() has been called."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

import gossamer.horovod.torch as hvd
from gossamer.errors import ConfigError

_OPERATIONS = {
    "sum": (hvd.Sum, dist.ReduceOp.SUM),
    "max": (hvd.Max, dist.ReduceOp.MAX),
    "min": (hvd.Min, dist.ReduceOp.MIN),
    "product": (hvd.Product, dist.ReduceOp.PRODUCT),
}


def reduce(tensor: Tensor, group: Any, reduce_op: Any) -> Any:
    """A new tensor; the mean of integers has fractions. None is the mean. Collective.

    Raises:
        ConfigError: a group; an unknown reduction.
    """
    _require_all("reduce", group)
    name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    if name in (None, "mean", "avg", dist.ReduceOp.AVG):
        exact = tensor.is_floating_point() or tensor.is_complex()
        return hvd.allreduce(tensor) if exact else hvd.allreduce(tensor, op=hvd.Sum) / hvd.size()
    for known, (op, torchs) in _OPERATIONS.items():
        if name in (known, torchs):
            return hvd.allreduce(tensor, op=op)
    raise ConfigError(
        f"HorovodStrategy.reduce: unrecognized `reduce_op`, must be mean, avg, {', '.join(_OPERATIONS)} or None, "
        f"got {reduce_op!r}"
    )


def gather(tensor: Tensor, group: Any) -> Tensor:
    """The ranks' tensors one after the other along dimension 0; 0 dimensions count as 1. Collective.

    Raises:
        ConfigError: a group.
    """
    _require_all("all_gather", group)
    return hvd.allgather(tensor.reshape(1) if tensor.ndim == 0 else tensor)


def _require_all(where: str, group: Any) -> None:
    if group not in (None, dist.group.WORLD):
        raise ConfigError(f"HorovodStrategy.{where}: group must be None, which is all ranks, got {group!r}")
