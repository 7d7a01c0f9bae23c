"""Communication that no backward waits for: a thread with its own connections, beside the engine's.

Algorithms whose messages take longer than a step make a Background in setup(), and close it in close().
"""

import atexit
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gossamer import _C
from gossamer.comm import Communicator, duplicate
from gossamer.engine.watching import watch_of
from gossamer.engine.worker import with_context

_log = logging.getLogger("gossamer")
_open: "weakref.WeakSet[Background]" = weakref.WeakSet()


class Background:
    """Runs tasks one after the other, in the order of submission, which is equal on all ranks.

    Making one is collective: it makes new connections among the ranks of `comm`, the model's communicator. On an
    accelerator a task has ended once the device has done what it queued.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm: Communicator = duplicate(comm)
        self._executor = _C.Executor(comm.device, self.comm)
        self.step: int = 0  # tasks so far, for the stall watch
        self._last, self._waiting = "", False
        self._watch = watch_of(self, self.comm, None, describe=str, unit="background task")
        _open.add(self)

    def submit(self, task: Callable[[], object], what: str, *, waits: bool = False) -> int:
        """Queue a task, and return its number. wait() raises its error.

        On an accelerator it runs behind what the current stream holds. NCCL wants one order of operations over all
        groups of a device, so there the task has queued its operations when this returns.

        Args:
            waits: the task waits on the host for other ranks, or for the caller. So this returns at once.
        """
        comm, guarded = self.comm, with_context(task, f"{what} raised", self.comm)

        def run() -> None:  # it does not hold this object
            try:
                guarded()
            except Exception:
                comm.announce_failure()
                raise

        number = self._executor.submit(run)
        self.step = self.step + 1
        self._last = what
        if self.comm.queues_on_device and not waits:
            with self._wait():
                self._executor.wait_until_run(number)
        return number

    def busy(self) -> bool:
        """Whether a submitted task has not ended."""
        return self._executor.busy()

    def wait(self, last: int | None = None) -> None:
        """Return when all tasks have ended, or those up to the number `last`; raise the first error."""
        with self._wait():
            self._executor.wait(last)

    @contextmanager
    def _wait(self) -> Iterator[None]:
        """Surrounds a wait, so that the stall watch sees it."""
        self._waiting = True
        try:
            with self._watch.waiting(self._last):
                yield
        finally:
            self._waiting = False

    def activity(self) -> list[tuple[str, int, float]]:
        """Return the running task for the stall watch. It counts as begun now, because nobody waits for it."""
        return [] if self._waiting or not self._executor.running() else [(self._last, -1, time.time())]

    def tell_stall(self, _facts: str, stop: bool) -> None:
        """End the wait of all ranks if `stop` is set. Called by the stall watch, which adds its facts to the error."""
        if stop:
            self.comm.announce_failure()

    def finish(self) -> None:
        """Let what was submitted run, and then end the thread. Returns at once, and nobody hears of errors."""
        self._watch.close()
        self._executor.finish()

    def drain(self) -> None:
        """Wait until everything has run whose model is gone. Its errors are logged."""
        try:
            self.wait()
        except Exception as error:
            _log.warning("gossamer: what a deleted model had begun could not be ended: %s", error)

    def close(self, *, crashed: bool = False) -> None:
        """End the thread. The ranks that wait for this one get an error soon if a task is unfinished. Idempotent.

        Args:
            crashed: this rank has failed; the other ranks get an error in any case.
        """
        _open.discard(self)
        self._watch.close()
        if crashed:
            self.comm.announce_failure()
        elif self._executor.running():
            self.comm.announce_failure("closed its model while it communicated")
        self._executor.stop()

    def __del__(self) -> None:
        if hasattr(self, "_executor"):
            self.close()


@atexit.register
def _close_all() -> None:
    # A wrapper that was dropped while a task ran is kept alive by that task. It ends as if the model had been closed:
    # this rank completes what the others wait for. A thread that runs Python when the interpreter ends would crash the
    # process.
    crashed = getattr(sys, "last_value", None) is not None
    # Idle ones are closed first. Otherwise a rank might wait for them while this rank waits for that rank's task.
    for background in sorted(_open, key=Background.busy):
        try:
            if not crashed:
                background.drain()
        finally:
            background.close(crashed=crashed)
