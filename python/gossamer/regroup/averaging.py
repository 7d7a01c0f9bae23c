"""Survival where the ranks train alone, and average in between: gs.LocalSGD, DiLoCo and its streaming form.

Nobody waits for anybody between two averagings, so a death is noticed in the next one. The others then form a group
and average again: each sends the change of its own weights since the last anchor, which all hold. So the share of the
dead is missing in that averaging, and nothing else. A rank that missed only the last message takes the anchor from one
that has it. The loop calls work() at each boundary, which does what LocalSGD does by itself after a step elsewhere.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms import LocalSGD
from gossamer.comm import gather_numbers
from gossamer.engine import Connections, Unsent, broadcast_everywhere, broadcast_state
from gossamer.engine.state import Fields, save_fields
from gossamer.regroup.apart import ApartSurvivor


@dataclass(frozen=True)
class OwnAverages:
    """What one rank brings from a group that has ended into the next one.

    Attributes:
        rounds: averagings that it has taken.
        counts: backwards and optimizer steps that have ended.
        pending: steps after which the algorithm has not been called to the end.
        plan: the names of the parameters of each bucket.
        fields: anchors, and what codecs have left unsent.
        averaging: see LocalSGD.own().
    """

    rounds: int
    counts: tuple[int, int]
    pending: list[int]
    plan: list[list[str]]
    fields: Fields
    averaging: dict[str, Any]


class AveragingSurvivor(ApartSurvivor[OwnAverages]):
    """See the module."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self._face.engine.algorithm, LocalSGD)
        self._algorithm: LocalSGD = self._face.engine.algorithm
        self._pending: list[int] = []  # steps after which the algorithm is still to be called
        # By parameter: weight - anchor, of a rank that others have left out.
        self._gaps: dict[str, Tensor] = {}

    def work(self) -> Callable[[], None] | None:
        """See Survivor."""
        if self._pending:
            return self._advance
        if self._finished:
            return None
        return self._average_now if self._stops or self._data.is_dry else None

    def _advance(self) -> None:
        with self._in_time():
            more = self._algorithm.advance(self._pending[0])
        if not more:
            del self._pending[0]

    def _average_now(self) -> None:
        # Wherever each of the others is, its next averaging is the same.
        with self._in_time():
            self._algorithm.average_now(self._face.engine.optimizer_steps)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Surround what may take an averaging."""
        before, began = self.count, time.monotonic()
        with (
            contextlib.nullcontext() if self._member is None else self._deadline.limit(self._member.complain)
        ):
            yield
        if self.count > before:
            self._deadline.waited(time.monotonic() - began)
            self._hear()

    def finish(self) -> None:
        """See Survivor."""
        # Where ranks go by their clocks, the next averaging may be due on one of them alone.
        self._finished = self._data.uneven
        if self._finished:
            self._pending.clear()

    def _arm(self) -> None:
        pending = self._own.pending if self._own is not None else self._pending
        if self._gaps:  # this rank goes on at the step of the others
            pending, self._gaps = [], {}
        super()._arm()
        if self._member is None and not self._data.uneven:
            return
        self._pending = self._face.engine.defer_steps(pending)
        self._begin_to_ask()

    # --- in the next group ---

    def _keep_own(self) -> None:
        self._algorithm.close()  # ends what still changes the fields
        super()._keep_own()

    def _make_own(self) -> OwnAverages:
        engine = self._face.engine
        averaging = self._algorithm.own()  # before the fields: it ends what changes them
        return OwnAverages(
            self.count,
            engine.counts,
            list(self._pending),
            engine.plan,
            save_fields(engine.buckets, ("anchor", Unsent.FIELD)),
            averaging,
        )

    def _meet(self) -> None:
        own = self._own
        assert own is not None
        links = self._connect_holders()
        self._face.engage(links, self._optimizers, restored=True)
        self._take(own, None)
        counts = gather_numbers(links.control, own.rounds, int(bool(own.pending)))
        last = max(count for count, _ in counts)
        if any(count < last for count, _ in counts):
            ahead = next(rank for rank, (count, _) in enumerate(counts) if count == last)
            self._take_averaging(links, own, ahead, take=own.rounds < last)
        self.changes_at = last + any(busy and count == last for count, busy in counts)
        self._arm()

    def _take_averaging(self, links: Connections, own: OwnAverages, ahead: int, *, take: bool) -> None:
        """Give the result of the last averaging, which rank `ahead` has, to the ranks that have missed its end."""
        averaging = broadcast_state(links.control, lambda: own.averaging, ahead, take=take)
        with torch.no_grad():
            broadcast_everywhere(links.comm, links.control, self._common(), ahead)
            if take:
                self._algorithm.catch_up(averaging)

    # --- newcomers ---

    def _state_of(self, own: OwnAverages) -> dict[str, Any]:
        return {"counts": list(own.counts), "plan": own.plan, "averaging": own.averaging}

    def _common(self) -> list[Tensor]:
        return list(self._algorithm.anchors)

    def _take(self, own: OwnAverages, state: dict[str, Any] | None) -> None:
        engine = self._face.engine
        if state is not None and self._gaps:
            engine.adopt(state["plan"], own.fields, tuple(state["counts"]))
            self._algorithm.follow(own.averaging, state["averaging"])
            return
        if state is not None:
            engine.adopt(state["plan"], {}, tuple(state["counts"]))
            self._algorithm.adopt(state["averaging"], from_other=True)
            return
        engine.adopt(own.plan, own.fields, own.counts)
        self._algorithm.adopt(own.averaging, from_other=False)

    def _has_common(self) -> None:
        self._algorithm.begin_at_anchors()
        for name, gap in self._gaps.items():
            self._face.engine.params[name].add_(gap)

    def _rejoin(self) -> None:
        own = self._own
        assert own is not None
        with torch.no_grad():
            params, anchors = self._face.engine.params, own.fields["anchor"]
            self._gaps = self._gaps or {name: params[name] - anchors[name] for name in anchors}
        super()._rejoin()
