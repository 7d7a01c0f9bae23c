"""Survival where the ranks' weights are averaged in the background while they train: gs.AsyncModelAverage.

Nobody waits for a round. When a member dies, the round under way fails, and the others form a group at their next
boundary. There they average their weights exactly, so that a newcomer can take them, and train on. So a death costs
the others the wait for the slowest of them to end its step. The loop calls work() at each boundary, which begins
rounds and adds their results, as the algorithm does by itself before a forward elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.algorithms import AsyncModelAverage
from gossamer.comm import gather_numbers
from gossamer.regroup.apart import ApartSurvivor


@dataclass(frozen=True)
class OwnCounts:
    """What one rank brings from a group that has ended into the next one, besides its weights.

    Attributes:
        rounds: whose result it has added.
        counts: backwards and optimizer steps that have ended.
        plan: the names of the parameters of each bucket.
    """

    rounds: int
    counts: tuple[int, int]
    plan: list[list[str]]


class AsyncSurvivor(ApartSurvivor[OwnCounts]):
    """See the module. Averagings are rounds."""

    _copies_common = False  # the weights are what the ranks average before newcomers are in

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self._face.engine.algorithm, AsyncModelAverage)
        self._algorithm: AsyncModelAverage = self._face.engine.algorithm

    def wish(self, *, change: bool, grows: bool, stop: bool) -> None:
        """See Survivor."""
        super().wish(change=change or grows, grows=grows, stop=stop)

    def work(self) -> Callable[[], None] | None:
        """See Survivor."""
        # After the last epoch a round would wait for ranks that begin no more.
        if self._finished or self._data.is_beyond(self._data.last_epoch):
            return None
        goes = self._member is not None and self._member.going
        if goes or self._stops or self._data.is_dry:  # what this rank has learned goes into a mean
            return self._average_now
        return self._advance if self._algorithm.is_due(self._face.engine.optimizer_steps) else None

    def _advance(self) -> None:
        if self._algorithm.advance():
            self._hear()

    def _average_now(self) -> None:
        self._algorithm.average_now()
        self._hear()

    def finish(self) -> None:
        """See Survivor."""
        self._finished = True

    def part(self) -> None:
        """See Survivor."""
        self._algorithm.part()

    def _arm(self) -> None:
        super()._arm()
        self._begin_to_ask()

    # --- in the next group ---

    def _keep_own(self) -> None:
        self.part()
        super()._keep_own()

    def _make_own(self) -> OwnCounts:
        engine = self._face.engine
        return OwnCounts(self.count, engine.counts, engine.plan)

    def _meet(self) -> None:
        own = self._own
        assert own is not None
        links = self._connect_holders()
        self._face.engage(links, self._optimizers, restored=True)
        self._take(own, None)
        self.changes_at = max(rounds for [rounds] in gather_numbers(links.control, own.rounds))
        self._algorithm.resume_at(self.changes_at)
        self._arm()

    def _welcome(self) -> None:
        self._face.consensus()
        super()._welcome()

    # --- newcomers ---

    def _state_of(self, own: OwnCounts, copied: bool) -> dict[str, Any]:
        return {"counts": list(own.counts), "plan": own.plan, "rounds": own.rounds}

    def _take(self, own: OwnCounts, state: dict[str, Any] | None) -> None:
        if state is not None:
            own = OwnCounts(state["rounds"], tuple(state["counts"]), state["plan"])
        self._face.engine.adopt(own.plan, {}, own.counts)
        self._algorithm.resume_at(own.rounds)
