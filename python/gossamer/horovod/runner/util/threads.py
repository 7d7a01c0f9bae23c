"""``in_thread``: Horovod's helper to start a thread."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls target(*args) in a new thread, and returns the thread. ``silent``: errors of the target are dropped.

    Raises:
        ValueError: ``args`` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"in_thread: args must be a tuple, got {args!r}; for a single argument give (arg,)")

    def run() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
