# Joining may wait as long as one collective, half an hour, for a worker that was never started, or that ended before it
# joined; nobody can know that it will not come. This says so meanwhile. runtime.py calls it; once a model is wrapped,
# waits are watched by observe/stall.
"""``told(placement, timeout_s)``: while workers join, those that wait for others say so."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gossamer import config
from gossamer.config import Placement

_log = logging.getLogger("gossamer")


@contextmanager
def told(placement: Placement, timeout_s: float) -> Iterator[None]:
    """While the body joins: logs a warning after each GOSSAMER_STALL_WARNING_S seconds; 0: never.

    Args:
        timeout_s: when the wait ends with an error, for the text.
    """
    every_s = config.current().stall_warning_s
    if placement.size == 1 or not every_s:
        yield
        return
    joined, begin = threading.Event(), time.monotonic()
    where = f" at {placement.master_addr}:{placement.master_port}" if placement.master_addr else ""

    def tell() -> None:
        while not joined.wait(every_s):
            _log.warning(
                "gossamer: rank %d/%d has waited %.0f s for the other workers to join%s; see whether all %d have "
                "started and none has ended; it gives up after %g s",
                *(placement.rank, placement.size, time.monotonic() - begin, where, placement.size, timeout_s),
            )

    thread = threading.Thread(target=tell, name="gossamer-joining", daemon=True)
    thread.start()
    try:
        yield
    finally:
        joined.set()
        thread.join()
