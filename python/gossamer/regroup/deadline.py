"""How long the ranks of an averaging wait for one that is late."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from statistics import median

from gossamer.errors import ConfigError

_WAITS = 20  # the last ones count
_FEWEST = 5  # before a deadline is computed from them
_LEAST_S = 1.0  # above the median


class Deadline:
    """A limit of the wait for an averaging, from the moment at which a rank has sent its share.

    Args:
        seconds: the limit.
        mads: instead, the limit in median absolute deviations above the median of this rank's last 20 waits. It is at
            least 1 s and half of the median above it. There is none before the fifth wait.

    Raises:
        ConfigError: both are given, or a number is not above 0.
    """

    def __init__(self, seconds: float | None, mads: float | None) -> None:
        if seconds is not None and mads is not None:
            raise ConfigError(
                f"elastic: deadline_s and deadline_mads must not both be given, got {seconds!r} and {mads!r}"
            )
        for name, value in (("deadline_s", seconds), ("deadline_mads", mads)):
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ConfigError(f"elastic: {name} must be a number above 0, got {value!r}")
        self.given: bool = seconds is not None or mads is not None
        self._seconds, self._mads = seconds, mads
        self._waits: deque[float] = deque(maxlen=_WAITS)

    def limit_s(self) -> float | None:
        """Return the present limit in seconds; None: there is none."""
        if self._mads is None:
            return self._seconds
        if len(self._waits) < _FEWEST:
            return None
        middle = median(self._waits)
        spread = median(abs(wait - middle) for wait in self._waits)
        return middle + max(self._mads * spread, middle / 2, _LEAST_S)

    def waited(self, seconds: float) -> None:
        """Note how long an averaging has taken that has ended well."""
        self._waits.append(seconds)

    @contextlib.contextmanager
    def limit(self, complain: Callable[[], None]) -> Iterator[None]:
        """Call `complain` once, on another thread, if what is inside takes longer than the limit."""
        seconds = self.limit_s()
        if seconds is None:
            yield
            return
        timer = threading.Timer(seconds, complain)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
