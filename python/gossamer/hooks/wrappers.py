"""Wrappers that give any hook of the form `(state, bucket) -> Future` its buckets in 16 bits.

torch has the same two. Its bf16 wrapper refuses CPU groups; these work wherever the inner hook works.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import ConfigError

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def bf16_wrapper(hook: Hook) -> Hook:
    """Returns a hook that gives `hook` the bucket in bfloat16. The result returns to the gradients' own dtype."""
    return _in_dtype(hook, torch.bfloat16)


def fp16_wrapper(hook: Hook) -> Hook:
    """Returns a hook that gives `hook` the bucket in float16, where gradients above 65504 become Inf."""
    return _in_dtype(hook, torch.float16)


def _in_dtype(hook: Hook, dtype: torch.dtype) -> Hook:
    if not callable(hook):
        raise ConfigError(f"hooks: a wrapper must be given a hook, got {hook!r}")

    def wrapper(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        own = bucket.buffer()
        bucket.set_buffer(own.to(dtype))
        return hook(state, bucket).then(lambda done: own.copy_(_tensor_of(done)))

    wrapper.__qualname__ = f"{getattr(hook, '__qualname__', type(hook).__name__)} in {dtype}"
    return wrapper


def _tensor_of(done: "torch.futures.Future[Any]") -> Tensor:
    value = done.value()
    result: Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return result
