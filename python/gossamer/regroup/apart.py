"""What ways to train have in common in which the ranks are apart, and meet in averagings alone."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from gossamer.algorithms.base import Question
from gossamer.comm import gather_numbers
from gossamer.regroup.newcomer import OptimizerCopy
from gossamer.regroup.survival import OwnT, Survivor, Wish


class Averaging(Protocol):
    """An algorithm that averages weights at times, and lets the ranks ask each other then."""

    @property
    def rounds(self) -> int:
        """Averagings so far, equal on all ranks after each."""
        ...

    @property
    def heard(self) -> list[list[int]]:
        """What all ranks have said in the last averaging."""
        ...

    def survive(self, ask: Callable[[], Question]) -> None:
        """Ask in each averaging from now on, and leave it to the caller when averagings are taken."""
        ...


class ApartSurvivor(Survivor[OwnT]):
    """See the module. What the ranks do together are averagings, in which each says what it wishes for."""

    _algorithm: Averaging

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._changes = self._grows = self._stops = self._finished = False

    @property
    def count(self) -> int:
        """See Survivor."""
        return self._algorithm.rounds

    @property
    def wished(self) -> Wish:
        """See Survivor."""
        return Wish(max((wish for wish, *_ in self._algorithm.heard), default=Wish.NOTHING))

    def wish(self, *, change: bool, grows: bool, stop: bool) -> None:
        """See Survivor."""
        self._changes, self._grows, self._stops = change, grows, stop

    def _hear(self) -> None:
        """Called after an averaging."""
        self._data.heard([own for _, _, *own in self._algorithm.heard])

    def _question(self) -> Question:
        wish = Wish.CHANGE if self._changes else Wish.DIVISION if self._data.is_dry else Wish.NOTHING
        numbers = (wish, int(self._expects_newcomers()), *self._data.numbers())
        return lambda comm: gather_numbers(comm, *numbers)

    def _expects_newcomers(self) -> bool:
        """Return whether this rank knows of workers that are about to be ready."""
        return self._grows or (self._member is not None and bool(self._member.copying))

    def _large_state(self) -> dict[str, Any]:
        return OptimizerCopy(self._optimizers).state()

    def _begin_to_ask(self) -> None:
        question = weakref.WeakMethod(self._question)
        nothing = [0] * (2 + len(self._data.numbers()))  # once the training loop is gone

        def ask() -> Question:
            found = question()
            return found() if found is not None else lambda comm: gather_numbers(comm, *nothing)

        self._algorithm.survive(ask)
