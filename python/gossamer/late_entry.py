"""A newcomer of an elastic run enters the group of workers when something first needs the group.

Such a process has called a face's init(), but is in no group yet, so that the others need not wait while it builds its
model. A face says how to enter (horovod/common); whatever looks up the group calls enter_now() first.
"""

from collections.abc import Callable

_enter: Callable[[], bool] | None = None


def on_need(enter: Callable[[], bool] | None) -> None:
    """Sets what enter_now() calls. None: this process is in the group, or is no newcomer."""
    global _enter
    _enter = enter


def enter_now() -> bool:
    """Lets a newcomer enter the group, and waits until the others let it in. Does nothing in any other process.

    Returns whether its rank or sizes differ from those that init() returned with.
    """
    return _enter is not None and _enter()
