"""Survival where the ranks train alone, and all average in between: gs.LocalSGD, DiLoCo and its streaming form.

Nobody waits for anybody between two averagings, so a death is noticed in the next one. The others then form a group
and average again: each sends the change of its own weights since the last anchor, which all hold. So the share of the
dead is missing in that averaging, and nothing else. A rank that missed only the last message takes the anchor from one
that has it. The loop calls work() at each boundary, which does what LocalSGD does by itself after a step elsewhere.

A newcomer has copied the anchor and the outer optimizer before it comes. So it joins before the others send, and takes
part in that averaging with weight 0. While one copies, all ranks meet before they send.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms import LocalSGD
from gossamer.comm import gather_numbers
from gossamer.engine import Face, Unsent, broadcast_everywhere, broadcast_state
from gossamer.engine.state import Fields, save_fields
from gossamer.regroup.apart import ApartSurvivor
from gossamer.regroup.newcomer import Copy, OptimizerCopy


class AveragingCopy(OptimizerCopy):
    """Also the anchors, and the state of the outer optimizer."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(optimizers)
        self.anchors: dict[str, Tensor] = {}
        self.shared: dict[str, Any] = {}

    def take(self, state: dict[str, Any]) -> None:
        """See newcomer.Copy."""
        super().take(state)
        self.anchors, self.shared = state["anchors"], state["shared"]


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
        self._awaits_newcomers = False  # a rank has said so in the last averaging
        self._joins = False  # all ranks have found newcomers to be ready before they send
        self._joining = False  # this group was formed for that, and has not averaged yet

    @classmethod
    def copy_for(cls, face: Face, optimizers: Sequence[torch.optim.Optimizer]) -> Copy:
        """See Survivor."""
        return AveragingCopy(optimizers)

    def work(self) -> Callable[[], None] | None:
        """See Survivor."""
        step = self._pending[0] if self._pending else self._face.engine.optimizer_steps
        averages_now = not self._pending and not self._finished and (self._stops or self._data.is_dry)
        if averages_now:
            self._algorithm.hasten(step)
        elif not self._pending:
            return None
        if self._awaits_newcomers and self._algorithm.sends_next(step):
            return self._find_newcomers
        return self._average_now if averages_now else self._advance

    @property
    def wished_first(self) -> bool:
        """See Survivor."""
        return self._joins

    def _find_newcomers(self) -> None:
        """Ask all ranks whether newcomers are ready, and none copies from this rank any more."""
        copies = self._donor is not None and self._donor.miss()
        with self._in_time():
            every = gather_numbers(self.control, int(self._grows), int(copies))
        self._awaits_newcomers = False  # until the next averaging
        self._joins = any(grows for grows, _ in every) and not any(copies for _, copies in every)

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
            self._averaged()

    def _averaged(self) -> None:
        """Called when this rank has taken an averaging."""
        self._hear()
        self._joining = False
        self._awaits_newcomers = any(expects for _, expects, *_ in self._algorithm.heard)
        if self._donor is not None and self._donor.gives:
            self._donor.renew()

    def finish(self) -> None:
        """See Survivor."""
        # Where ranks go by their clocks, the next averaging may be due on one of them alone.
        self._finished = self._data.uneven
        if self._finished:
            self._pending.clear()

    def meet(self) -> None:
        """See Survivor. If all are to end before, those that are not here average at once, and so does this rank."""
        member = self._member
        assert member is not None
        if self._finished or member.meet_at_end():
            super().meet()

    def part(self) -> None:
        """See Survivor."""
        self._algorithm.close()  # ends what still changes the fields

    def _arm(self) -> None:
        # A rank that was late goes on at the step of the others.
        pending = self._own.pending if self._own is not None and not self._gaps else self._pending
        self._gaps = {}
        self._awaits_newcomers = False  # newcomers have heard nothing yet
        super()._arm()
        if self._member is None and not self._data.uneven:
            return
        self._pending = self._face.engine.defer_steps(pending)
        self._begin_to_ask()

    # --- in the next group ---

    def _keep_own(self) -> None:
        self.part()
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
        self._face.engage(self._connect_holders(), self._optimizers, restored=True)
        self._take(own, None)
        self._settle(own)
        self._arm()

    def _settle(self, own: OwnAverages) -> None:
        """In the next group: see _meet()."""
        counts = gather_numbers(self.control, own.rounds, int(bool(own.pending)), int(self._joins))
        last = max(count for count, *_ in counts)
        if any(count < last for count, *_ in counts):
            ahead = next(rank for rank, (count, *_) in enumerate(counts) if count == last)
            self._take_averaging(own, ahead, take=own.rounds < last)
        self._joins, self._joining = False, any(joins for *_, joins in counts)
        waits = not self._joining and any(busy and count == last for count, busy, _ in counts)
        self.changes_at = last + waits

    def _take_averaging(self, own: OwnAverages, ahead: int, *, take: bool) -> None:
        """Give the result of the last averaging, which rank `ahead` has, to the ranks that have missed its end."""
        links = self._face.links
        averaging = broadcast_state(links.control, lambda: own.averaging, ahead, take=take)
        with torch.no_grad():
            broadcast_everywhere(links.comm, links.control, self._common(), ahead)
            if take:
                self._algorithm.catch_up(averaging)

    # --- newcomers ---

    def _divides(self) -> bool:
        # What has been drawn, and is not averaged yet, would be in no mean if its worker died.
        return not self._joining

    def _welcome(self) -> None:
        super()._welcome()
        if self._joining and not self._algorithm.counts:
            self._algorithm.weigh_next(1.0)

    def _large_state(self) -> dict[str, Any]:
        anchors = save_fields(self._face.engine.buckets, ("anchor",))["anchor"]
        return super()._large_state() | {"anchors": anchors, "shared": self._algorithm.shared_state()}

    def _large_tensors(self, own: OwnAverages) -> list[Tensor]:
        anchors, rounds = own.fields["anchor"], own.rounds
        if isinstance(self._copy, AveragingCopy):
            anchors, rounds = self._copy.anchors, self._copy.shared["rounds"]
        return [torch.tensor(rounds), *(anchors[name] for name in sorted(anchors))]

    def _state_of(self, own: OwnAverages, copied: bool) -> dict[str, Any]:
        averaging = {key: value for key, value in own.averaging.items() if not (copied and key == "outer")}
        state = {"counts": list(own.counts), "plan": own.plan, "averaging": averaging}
        return state | {"pending": own.pending, "joining": self._joining}

    def _common(self) -> list[Tensor]:
        return list(self._algorithm.anchors)

    def _take(self, own: OwnAverages, state: dict[str, Any] | None) -> None:
        engine = self._face.engine
        if state is None:
            engine.adopt(own.plan, own.fields, own.counts)
            self._algorithm.adopt(own.averaging, from_other=False)
            return
        averaging, fields = state["averaging"], own.fields if self._gaps else {}
        if "outer" not in averaging:
            assert isinstance(self._copy, AveragingCopy)
            averaging = averaging | {"outer": self._copy.shared["outer"]}
            fields = {"anchor": self._copy.anchors}
        engine.adopt(state["plan"], fields, tuple(state["counts"]))
        if self._gaps:
            self._algorithm.follow(own.averaging, averaging)
        else:
            self._algorithm.adopt(averaging, from_other=True)
        self._pending, self._joining = list(state["pending"]), state["joining"]
        if self._joining and not self._algorithm.counts:
            self._algorithm.weigh_next(1.0 if self._gaps else 0.0)

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
