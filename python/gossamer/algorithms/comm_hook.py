"""A communication hook of torch DDP as an algorithm: what register_comm_hook() of the faces puts in place of another.

Not in the table of names: it needs its hook. The hook is called on the engine's worker thread, for one bucket after the
other, and is waited for there; backward goes on meanwhile.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer import _C
from gossamer.algorithms.base import Algorithm
from gossamer.errors import ConfigError


class CommHook(Algorithm):
    """g <- the value of the future that hook(state, bucket) returns; the hook averages, if it wants to.

    Args:
        state: passed to the hook.
        hook: takes a torch.distributed.GradBucket. Its buffer is a bucket's gradients without padding, in the memory
            order of each parameter: what torch DDP gives.

    Raises:
        ConfigError: the hook is not callable.
    """

    uneven_inputs = True  # as with torch DDP, the hook is given zeros then
    average = False  # that it does is not known

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        if not callable(hook):
            raise ConfigError(f"register_comm_hook: hook must be callable, got {hook!r}")
        self.hook = getattr(hook, "__qualname__", type(hook).__name__)  # public: ranks compare it
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
    """The gradients' places in the flat memory, one-dimensional, without the padding between them."""
    flat = bucket.flat()
    starts = [view.storage_offset() - flat.storage_offset() for view in bucket.views()]
    return [flat.narrow(0, start, param.numel()) for start, param in zip(starts, bucket.params, strict=True)]


def _packed(bucket: _C.Bucket, parts: list[Tensor]) -> Tensor:
    """All gradients in a row: the flat memory itself, where there is no padding between them."""
    total = sum(part.numel() for part in parts)
    flat: Tensor = bucket.flat()
    dense = parts[-1].storage_offset() - flat.storage_offset() + parts[-1].numel() == total
    return flat.narrow(0, 0, total) if dense else torch.cat(parts)
