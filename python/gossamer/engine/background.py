"""Communication that no backward waits for: a thread and connections of its own, beside the engine's.

For algorithms whose messages take longer than a step. Made in an algorithm's setup, closed in its close().
"""

import atexit
import logging
import sys
import time
import weakref
from collections.abc import Callable

from gossamer import _C
from gossamer.comm import Communicator, duplicate
from gossamer.engine.watching import watch_of
from gossamer.engine.worker import with_context

_log = logging.getLogger("gossamer")
_open: "weakref.WeakSet[Background]" = weakref.WeakSet()


class Background:
    """Runs tasks one after the other, in the order of submission, which is the same on all ranks.

    Args:
        comm: the model's communicator. New connections among its ranks are made, so this is collective.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = duplicate(comm)
        self._executor = _C.Executor(comm.device)
        self.step = 0  # tasks so far, for the stall watch
        self._last, self._waiting = "", False
        self._watch = watch_of(self, self.comm, None, describe=str, unit="background task")
        _open.add(self)

    def submit(self, task: Callable[[], object], what: str) -> None:
        """Queues a task, on an accelerator behind what the current stream holds. Its error comes out of wait()."""
        guarded = with_context(task, f"{what} raised", self.comm)
        self._executor.submit(_announced(guarded, self.comm))
        self.step, self._last = self.step + 1, what

    def busy(self) -> bool:
        """Whether something was submitted that has not ended."""
        return self._executor.busy()

    def wait(self) -> None:
        """Until all is done; raises the first error."""
        self._waiting = True
        try:
            with self._watch.waiting(self._last):
                self._executor.wait()
        finally:
            self._waiting = False

    def activity(self) -> list[tuple[str, int, float]]:
        """For the stall watch: what this rank has come to without waiting for it, which is no stall."""
        return [] if self._waiting or not self.busy() else [(self._last, -1, time.time())]

    def tell_stall(self, _facts: str, stop: bool) -> None:
        """Of the stall watch, whose facts are in the error of wait(): `stop` ends what the ranks wait for."""
        if stop:
            self.comm.announce_failure()

    def close(self, *, crashed: bool = False) -> None:
        """Ends the thread. Ranks that wait for this one get an error soon, if a task is unfinished or it has crashed.

        Idempotent.
        """
        _open.discard(self)
        self._watch.close()
        if crashed:
            self.comm.announce_failure()
        elif self._executor.busy():
            self.comm.announce_failure("closed its model while it communicated")
        self._executor.stop()

    def __del__(self) -> None:
        if hasattr(self, "_executor"):
            self.close()


@atexit.register
def _close_all() -> None:
    # Of wrappers that were dropped while a task ran: the task holds what it works on, and this with it. It ends as if
    # the model had been closed: this rank does its part of what the others wait for. A thread that still runs Python
    # when the interpreter ends takes the process down.
    crashed = getattr(sys, "last_value", None) is not None
    # The idle ones go first, so that no other rank waits for them while this one waits for that rank.
    for background in sorted(_open, key=Background.busy):
        try:
            if not crashed:
                background.wait()
        except Exception:
            _log.exception("gossamer: what a deleted model had begun could not be ended")
        finally:
            background.close(crashed=crashed)


def _announced(task: Callable[[], object], comm: Communicator) -> Callable[[], None]:
    def call() -> None:
        try:
            task()
        except Exception:
            comm.announce_failure()
            raise

    return call
