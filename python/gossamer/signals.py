"""Signals that must not interrupt what would otherwise be left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Holds signals back until the end of the block, and then raises them for the handlers that were set before.

    Outside of the main thread, which alone runs handlers of Python's, it does nothing. A process that is started in
    the block is not protected from them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def catch(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)
