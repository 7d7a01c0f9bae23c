"""When an algorithm averages whose ranks train alone in between: after so many steps, or after so many seconds.

The fragments of a model take turns within a period. All ranks average them in the same order.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable


class Periods(ABC):
    """Tells after each optimizer step which fragments are to be sent now."""

    #: The fragment that is sent next, where steps do not say it.
    next: int = 0

    @abstractmethod
    def due(self, step: int) -> list[int]:
        """Return the fragments to send after this step, the number of steps so far."""

    @abstractmethod
    def early(self, step: int) -> int:
        """Return the fragment that is due next after this step, and is now sent before that."""

    def arrived(self, began: float) -> None:
        """Note that the mean of the fragment sent last has arrived. `began`: clock() when this rank began to wait."""

    def clock(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()


class BySteps(Periods):
    """Fragment f is due at the steps that leave f * period // fragments when divided by the period."""

    def __init__(self, period: int, fragments: int) -> None:
        self._period, self._fragments = period, fragments

    def due(self, step: int) -> list[int]:
        """See Periods."""
        return [
            fragment for fragment in range(self._fragments) if step % self._period == self._place(fragment)
        ]

    def early(self, step: int) -> int:
        """See Periods."""
        return min(range(self._fragments), key=lambda each: (self._place(each) - step - 1) % self._period)

    def _place(self, fragment: int) -> int:
        return fragment * self._period // self._fragments


class ByTime(Periods):
    """One fragment is due every `period_s` / fragments seconds, after the step that ends nearest to that time.

    Each rank follows its own clock from the last mean that it waited for, so ranks of any speed are ready at about the
    same time. The first step only starts the clock, because it may compile or load.
    """

    def __init__(self, period_s: float, fragments: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slot_s, self._fragments, self._clock = period_s / fragments, fragments, clock
        self._last: float | None = None  # the end of the last step
        self._deadline = self._sent = 0.0

    def clock(self) -> float:
        """See Periods."""
        return self._clock()

    def due(self, step: int) -> list[int]:
        """See Periods."""
        now = self._clock()
        last, self._last = self._last, now
        if last is None:
            self._deadline = now + self._slot_s
            return []
        if now + (now - last) / 2 < self._deadline:
            return []
        return [self.early(step)]

    def early(self, step: int) -> int:
        """See Periods."""
        fragment, self.next = self.next, (self.next + 1) % self._fragments
        self._sent = self._clock()
        self._deadline = self._sent + self._slot_s
        return fragment

    def arrived(self, began: float) -> None:
        """See Periods. A rank that had to wait begins its period anew, as late as the rank that it waited for."""
        self._last = now = self._clock()
        self._deadline = max(self._deadline, now + self._slot_s - (began - self._sent))
