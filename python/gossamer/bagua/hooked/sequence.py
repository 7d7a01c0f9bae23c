"""Which bucket begins next: in a fixed order, so that all ranks send the same. Used by algorithm.py."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.tensor import bagua_tensor_name
from gossamer.errors import ConfigError

_IN_HOOK = 0  # no thread's number


class BucketSequence:
    """Buckets that begin one after the other, and then all over again.

    Args:
        begin: called with each bucket when its turn has come and its tensors are ready.
    """

    def __init__(self, buckets: Sequence[BaguaBucket], begin: Callable[[BaguaBucket], None]) -> None:
        self._buckets, self._begin = buckets, begin
        self._ready: list[dict[int, int]] = [
            {} for _ in buckets
        ]  # of a tensor that is: the thread that marked it
        self._next = 0
        self._ended = False
        self._lock = (
            threading.Lock()
        )  # autograd calls from a thread for each device, an algorithm from its own
        self._local = threading.local()

    @contextmanager
    def hook(self) -> Iterator[None]:
        """While this thread runs a hook of the algorithm: what it marks must be whole at the moment's end."""
        before = self._thread()
        self._local.number = _IN_HOOK
        try:
            yield
        finally:
            self._local.number = before

    def mark(self, number: int, index: int) -> None:
        """Tensor `index` of bucket `number` is ready. Begins what can begin."""
        with self._lock:
            if self._ended:
                raise ConfigError(
                    "bagua_mark_communication_ready: the model of this tensor has ended; end a thread that marks "
                    "tensors before close(), and before with_bagua is called again"
                )
            self._ready[number][index] = self._thread()
            while len(self._ready[self._next]) == len(self._buckets[self._next].tensors):
                self._ready[self._next].clear()
                self._begin(self._buckets[self._next])
                self._next = (self._next + 1) % len(self._buckets)

    def end(self) -> None:
        """No bucket begins after this."""
        with self._lock:
            self._ended = True

    def require_whole(self, moment: str) -> None:
        """ConfigError if hooks, or this thread, have marked tensors whose bucket has not begun: all others would wait
        for it for ever. An algorithm's own threads mark when they like.
        """
        with self._lock:
            owed = {_IN_HOOK, threading.get_ident()}
            if not any(thread in owed for ready in self._ready for thread in ready.values()):
                return
            bucket, ready = self._buckets[self._next], self._ready[self._next]
            missing = [bagua_tensor_name(each) for i, each in enumerate(bucket.tensors) if i not in ready]
            raise ConfigError(
                f"bagua: at the end of the {moment} {bucket!r} has not begun, because no hook has marked {missing} "
                f"ready; mark every tensor of every bucket as often as the others"
            )

    def _thread(self) -> int:
        """This thread's number, or that of hooks."""
        return getattr(self._local, "number", threading.get_ident())
