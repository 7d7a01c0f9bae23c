"""reduce() and all_gather() of HorovodStrategy, by hvd's operations. They need hvd.init()."""

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
    """Return the reduction as a new tensor. None is the mean, and the mean of integers is a float. Collective.

    Raises:
        ConfigError: A group is given, or the reduction is unknown.
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
    """Return the ranks' tensors, joined along dimension 0. A scalar counts as [1]. Collective.

    Raises:
        ConfigError: A group is given.
    """
    _require_all("all_gather", group)
    return hvd.allgather(tensor.reshape(1) if tensor.ndim == 0 else tensor)


def _require_all(where: str, group: Any) -> None:
    if group not in (None, dist.group.WORLD):
        raise ConfigError(f"HorovodStrategy.{where}: group must be None, which is all ranks, got {group!r}")
