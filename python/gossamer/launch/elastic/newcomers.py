# Workers that arrive while a group trains. Each is answered at once, so that its script goes on to build its model, and
# is taken in when it has said that it is ready. Used by driver.py.
"""The workers that get ready outside of the group."""

import time
from collections.abc import Callable, Iterable, Mapping

from gossamer.launch.elastic.board import Board, News
from gossamer.launch.elastic.slots import Slot, seats
from gossamer.membership import ARRIVED, COPIES

GATHER_S = 2.0  # how long a ready worker waits for others to become ready, because each new group costs time


class Newcomers:
    """The workers that were told a place before a group had them."""

    def __init__(self, board: Board, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._seated: set[int] = set()  # workers that have been in a group
        self.preparing: set[int] = set()  # workers that were told a place and have been in no group
        self._ready_since: float | None = None  # when the first newcomer was ready

    def welcome(self, outside: Mapping[int, News], slots: dict[int, Slot]) -> list[int]:
        """Returns the newcomers that are ready to join those that train, and tells new arrivals their future place.

        Args:
            outside: the workers that are not in the group.
            slots: the slots of all workers that may be in the next group, in rank order.
        """
        for number, news in outside.items():
            if news.reason == ARRIVED and number not in self.preparing:
                self.preparing.add(number)
                self._board.answer(number, seats(slots))
        self._board.announce_copying(
            {number: news.attempt for number, news in outside.items() if news.reason == COPIES}
        )
        return [number for number, news in outside.items() if news.reason not in (ARRIVED, COPIES)]

    def without_a_group(self, outside: Iterable[int]) -> list[int]:
        """Returns the newcomers that may form a group while nobody trains.

        Workers that were told a place are left out: their rank was not 0, so their scripts have not done what rank 0
        does before it trains, such as load a checkpoint.
        """
        return [number for number in outside if number not in self.preparing]

    def gathered(self, ready: list[int]) -> bool:
        """Returns whether it is time to take in the newcomers that are ready."""
        if not ready:
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = self._clock()
        return self.preparing <= set(ready) or self._clock() - self._ready_since > GATHER_S

    def seat(self, members: Iterable[int]) -> None:
        """Makes these workers the next group."""
        for number in set(members) - self._seated - self.preparing:
            self._board.answer(number, None)
        self._seated |= set(members)
        self.preparing -= self._seated

    def have_been_seated(self, number: int) -> bool:
        return number in self._seated

    def forget(self, number: int) -> None:
        """Forgets a worker that has ended."""
        self.preparing.discard(number)
