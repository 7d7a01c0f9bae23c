"""``told(placement, timeout_s)``: workers that wait for others to join log a warning.

Joining may wait half an hour for a worker that was never started, or that ended before it joined: no rank can know that
it will not come. runtime.py uses it. Once a model is wrapped, observe/stall watches the waits.
"""

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
    """Logs a warning every GOSSAMER_STALL_WARNING_S seconds while its body joins; 0: never.

    Args:
        timeout_s: the number of seconds after which the wait ends with an error, for the message.
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
