"""A communication hook of torch DDP as an algorithm. register_comm_hook() of the faces puts it in the place of another.

It is not in the table of names, because it needs its hook. The engine's worker thread calls the hook for one bucket
after the other, and waits for its future. Backward goes on meanwhile.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer import _C
from gossamer.algorithms.base import Algorithm
from gossamer.errors import ConfigError


class CommHook(Algorithm):
    """g <- the value of the future that hook(state, bucket) returns. Whether to average is up to the hook.

    Args:
        state: the hook's first argument.
        hook: takes a torch.distributed.GradBucket, as from torch DDP. Its buffer holds a bucket's gradients without
            padding, each in the memory order of its parameter.

    Raises:
        ConfigError: the hook is not callable.
    """

    uneven_inputs = True  # the hook gets zeros then, as with torch DDP
    average = False  # it is not known whether the hook averages

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        if not callable(hook):
            raise ConfigError(f"register_comm_hook: hook must be callable, got {hook!r}")
        self.hook: str = getattr(hook, "__qualname__", type(hook).__name__)  # public: ranks compare it
        self._state, self._hook = state, hook
        self._count = 0

    def setup(self, comm: Any, buckets: list[_C.Bucket]) -> None:
        self._count = len(buckets)

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        parts = _gradients(bucket)
        given = _packed(bucket, parts)
        future = self._hook(self._state, _C.grad_bucket(bucket, given, self._count))
        if not hasattr(future, "wait"):
            raise ConfigError(
                f"register_comm_hook: {self.hook} must return a torch.futures.Future, got {future!r}"
            )
        value = future.wait()
        result = value[0] if isinstance(value, (list, tuple)) and value else value
        if not isinstance(result, Tensor) or result.numel() != given.numel():
            raise ConfigError(
                f"register_comm_hook: the future of {self.hook} must hold one tensor of {given.numel()} elements, got "
                f"{tuple(result.shape) if isinstance(result, Tensor) else result!r}"
            )
        flat = result.detach().reshape(-1)
        if flat.data_ptr() == bucket.flat().data_ptr():
            return  # in place
        for part, new in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(new)


def _gradients(bucket: _C.Bucket) -> list[Tensor]:
    """Returns one-dimensional views of the gradients in the flat memory, without the padding between them."""
    flat = bucket.flat()
    starts = [view.storage_offset() - flat.storage_offset() for view in bucket.views()]
    return [flat.narrow(0, start, param.numel()) for start, param in zip(starts, bucket.params, strict=True)]


def _packed(bucket: _C.Bucket, parts: list[Tensor]) -> Tensor:
    """Returns all gradients in a row: a copy, or the flat memory itself if it has no padding between them."""
    total = sum(part.numel() for part in parts)
    flat: Tensor = bucket.flat()
    dense = parts[-1].storage_offset() - flat.storage_offset() + parts[-1].numel() == total
    return flat.narrow(0, 0, total) if dense else torch.cat(parts)
