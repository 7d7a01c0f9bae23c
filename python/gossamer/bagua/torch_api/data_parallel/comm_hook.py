"""A communication hook of torch's DistributedDataParallel as an algorithm of the native engine. Used by wrapper.py."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gossamer import algorithms
from gossamer.bagua.torch_api.algorithms.native import NativeAlgorithm, NativeImpl


class HookBucket:
    """What a hook is given: torch.distributed.GradBucket's methods over a bucket of the engine."""

    def __init__(self, bucket: Any, is_last: bool) -> None:
        self._bucket, self._is_last = bucket, is_last

    def index(self) -> int:
        """Its place among the buckets."""
        return int(self._bucket.index)

    def buffer(self) -> Tensor:
        """All gradients in a row [numel], with padding of zeros."""
        flat: Tensor = self._bucket.flat()
        return flat

    def gradients(self) -> list[Tensor]:
        """The same memory, a tensor for each parameter."""
        return list(self._bucket.views())

    def parameters(self) -> list[Tensor]:
        """The parameters."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """Whether the hook is called with no other bucket in this backward."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Overwrites all gradients."""
        self.buffer().copy_(buffer)


class _CommHook(algorithms.Algorithm):
    """g <- the value of hook(state, bucket)'s future."""

    uneven_inputs = True  # as with torch DDP, the hook is given zeros
    average = False  # that it does is not known

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self.hook = getattr(hook, "__qualname__", type(hook).__name__)  # public: ranks compare it
        self._state, self._hook = state, hook

    def setup(self, comm: Any, buckets: list[Any]) -> None:
        self._last = len(buckets) - 1

    def bucket_ready(self, bucket: Any) -> None:
        value = self._hook(self._state, HookBucket(bucket, bucket.index == self._last)).wait()
        result = value[0] if isinstance(value, (list, tuple)) else value
        bucket.flat().copy_(result.view(-1))


class CommHook(NativeImpl):
    """A hook at work in one model."""

    tunable = False  # hooks such as PowerSGD's keep state by a bucket's index


class CommHookAlgorithm(NativeAlgorithm):
    """Declares it."""

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self._state, self._hook = state, hook

    def native(self) -> algorithms.Algorithm:
        return _CommHook(self._state, self._hook)

    def reify(self, process_group: Any) -> CommHook:
        return CommHook(process_group, self.native())
