"""The two threads that run all stall watches of this process.

One thread looks and logs. The other talks to stores, where it may block for as long as the host of a store is stopped.
Both sleep while there is nothing to watch, and between two looks. They keep no watch alive.
"""

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from operator import methodcaller
from typing import Protocol

from gossamer import _C

LONGEST_TICK_S = 5.0  # between two looks
_END_S = 2.0  # wait for a thread that is writing a log line when the interpreter ends

_log = logging.getLogger("gossamer")


class Looking(Protocol):
    """What the threads call, each of them every `tick_s` seconds."""

    @property
    def tick_s(self) -> float: ...

    def look(self) -> None:
        """Look at this process, and log. Must not block."""

    def exchange(self) -> None:
        """Talk to the store. May block."""


class WatchThreads:
    """The threads of one process. They start with the first watch, and again in a forked child that opens a watch."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Looking] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._turns = 0  # grows when the threads must look at once
        self._owner = 0
        self._ending = False
        self._threads: list[threading.Thread] = []
        atexit.register(self._end)

    def add(self, watch: Looking) -> None:
        """Run the watch from now on, until it is discarded or deleted."""
        with self._changed:
            self._watches.add(watch)
            if self._owner != os.getpid():
                self._owner = os.getpid()
                self._start()
        self.hurry()

    def discard(self, watch: Looking) -> None:
        """Stop running the watch. Idempotent."""
        with self._changed:
            self._watches.discard(watch)

    def hurry(self) -> None:
        """Let both threads look now."""
        with self._changed:
            self._turns += 1
            self._changed.notify_all()

    def _start(self) -> None:
        self._threads = []
        for name, act in (("gossamer-watch", "look"), ("gossamer-watch-store", "exchange")):
            run = threading.Thread(target=self._run, args=(methodcaller(act),), name=name, daemon=True)
            self._threads.append(run)
            run.start()

    def _run(self, act: Callable[[Looking], None]) -> None:
        seen = 0
        while True:
            with self._changed:
                tick_s = min((watch.tick_s for watch in self._watches), default=None)
                if not self._ending and self._turns == seen:
                    self._changed.wait(tick_s)
                if self._ending:
                    return
                seen, watches = self._turns, list(self._watches)
            while watches:
                self._call(act, watches.pop())

    def _call(self, act: Callable[[Looking], None], watch: Looking) -> None:
        try:
            act(watch)
        except Exception:
            self.discard(watch)
            _log.exception(
                "gossamer: the stall watch of a model has failed and ended; training goes on without it"
            )

    def _end(self) -> None:
        # A thread that returns from native code into an interpreter that ends crashes the process.
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        _C.AsideStore.leave()
        for thread in self._threads if self._owner == os.getpid() else []:
            thread.join(_END_S)


threads: WatchThreads = WatchThreads()
