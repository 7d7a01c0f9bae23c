# A newcomer of an elastic run has a face's init() behind it and no group yet, so that others need not wait while it
# builds its model. It enters the group at the latest when something needs it. A face says how (horovod/common);
# whatever looks up the group asks here first (runtime.py, comm/c10d.py, horovod/common). Knows no group itself.
"""Entering the group of workers at the first need."""

from collections.abc import Callable

_enter: Callable[[], bool] | None = None


def on_need(enter: Callable[[], bool] | None) -> None:
    """`enter` is called when something needs the group, and says whether this process has another place in it than
    init() told. None: this process is in the group, or is no newcomer.
    """
    global _enter
    _enter = enter


def enter_now() -> bool:
    """Something needs the group: a newcomer that has not entered does so, and waits until the others let it in.

    Returns whether its place is another than init() told.
    """
    return _enter is not None and _enter()
