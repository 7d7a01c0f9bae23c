"""The order in which buckets begin. It is fixed, so that all ranks send the same. Used by algorithm.py."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.tensor import bagua_tensor_name
from gossamer.errors import ConfigError

_IN_HOOK = 0  # stands for hooks among the numbers of threads; no thread has it


class BucketSequence:
    """Begins buckets one after the other; after the last comes the first again.

    Args:
        begin: called with a bucket when all of its tensors are ready and every bucket before it has begun.
    """

    def __init__(self, buckets: Sequence[BaguaBucket], begin: Callable[[BaguaBucket], None]) -> None:
        self._buckets, self._begin = buckets, begin
        # For each bucket: the tensors that are ready, and the number of the thread that marked each.
        self._ready: list[dict[int, int]] = [{} for _ in buckets]
        self._next = 0
        self._ended = False
        self._lock = threading.Lock()  # autograd marks from one thread a device, an algorithm from its own
        self._local = threading.local()

    @contextmanager
    def hook(self) -> Iterator[None]:
        """Run a hook of the algorithm within it. Buckets that the hook marks must have begun at require_whole()."""
        before = self._thread()
        self._local.number = _IN_HOOK
        try:
            yield
        finally:
            self._local.number = before

    def mark(self, number: int, index: int) -> None:
        """Notes that tensor `index` of bucket `number` is ready, and begins each bucket whose turn has come."""
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
        """ConfigError if a hook, or this thread, has marked tensors of a bucket that has not begun.

        The other ranks would wait for that bucket for ever. An algorithm's own threads may mark at any time.
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
        """The number of this thread, or _IN_HOOK while it runs a hook."""
        return getattr(self._local, "number", threading.get_ident())
