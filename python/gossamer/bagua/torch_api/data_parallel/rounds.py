"""Which bucket begins next: in a fixed order, so that all ranks send the same. Used by hook_engine.py."""

import threading
from collections.abc import Callable, Sequence

from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.tensor import bagua_tensor_name
from gossamer.errors import ConfigError


class Rounds:
    """Buckets that begin one after the other, and then all over again.

    Args:
        begin: called with each bucket when its turn has come and its tensors are ready.
    """

    def __init__(self, buckets: Sequence[BaguaBucket], begin: Callable[[BaguaBucket], None]) -> None:
        self._buckets, self._begin = buckets, begin
        self._ready: list[set[int]] = [set() for _ in buckets]
        self._next = 0
        self._lock = threading.Lock()  # autograd calls from a thread for each device

    def mark(self, number: int, index: int) -> None:
        """Tensor `index` of bucket `number` is ready. Begins what can begin."""
        with self._lock:
            self._ready[number].add(index)
            while len(self._ready[self._next]) == len(self._buckets[self._next].tensors):
                self._ready[self._next].clear()
                self._begin(self._buckets[self._next])
                self._next = (self._next + 1) % len(self._buckets)

    def require_whole(self, moment: str) -> None:
        """ConfigError if tensors are ready whose bucket has not begun: it would keep all others waiting for ever."""
        with self._lock:
            if not any(self._ready):
                return
            bucket, ready = self._buckets[self._next], self._ready[self._next]
            missing = [bagua_tensor_name(each) for i, each in enumerate(bucket.tensors) if i not in ready]
            raise ConfigError(
                f"bagua: at the end of the {moment} {bucket!r} has not begun, because no hook has marked {missing} "
                f"ready; mark every tensor of every bucket as often as the others"
            )
