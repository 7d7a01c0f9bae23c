# Workers that arrive while a group trains: they are answered at once, so that their scripts go on to build models, and
# are taken in once they have said that they are ready. Used by driver.py.
"""Who gets ready outside of the group."""

import time
from collections.abc import Callable, Iterable, Mapping

from gossamer.launch.elastic.board import Board, News
from gossamer.launch.elastic.slots import Slot, seats
from gossamer.membership import ARRIVED

GATHER_S = 2.0  # one that is ready waits so long for others that are not yet, as each new group costs time


class Newcomers:
    """Knows which workers were told a place before there was a group with them."""

    def __init__(self, board: Board, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._seated: set[int] = set()  # have been in a group
        self.preparing: set[int] = set()  # were told a place, and have not been in a group
        self._ready_since: float | None = None  # the first of those that wait to be taken in

    def welcome(self, outside: Mapping[int, News], slots: dict[int, Slot]) -> list[int]:
        """While others train: returns who is ready to join them. Who has only arrived is told the place it would have.

        Args:
            outside: the workers that are not in the group.
            slots: of all workers that may be in the next one, in rank order.
        """
        for number, news in outside.items():
            if news.reason == ARRIVED and number not in self.preparing:
                self.preparing.add(number)
                self._board.answer(number, seats(slots))
        return [number for number, news in outside.items() if news.reason != ARRIVED]

    def without_a_group(self, outside: Iterable[int]) -> list[int]:
        """While nobody trains: returns who may form a group, as there is nobody to keep waiting.

        Not those that were told another rank than 0: they have not done what scripts do on rank 0 before they train,
        such as load a checkpoint.
        """
        return [number for number in outside if number not in self.preparing]

    def gathered(self, ready: list[int]) -> bool:
        """Whether it is time to take in those that are ready."""
        if not ready:
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = self._clock()
        return self.preparing <= set(ready) or self._clock() - self._ready_since > GATHER_S

    def seat(self, members: Iterable[int]) -> None:
        """They are the next group."""
        for number in set(members) - self._seated - self.preparing:
            self._board.answer(number, None)
        self._seated |= set(members)
        self.preparing -= self._seated

    def have_been_seated(self, number: int) -> bool:
        return number in self._seated

    def forget(self, number: int) -> None:
        """It has ended."""
        self.preparing.discard(number)
