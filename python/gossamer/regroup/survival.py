"""Carries one model's training from a group of workers into the next one.

Survivor is what all ways to train have in common: to leave a group, to enter the next one, and to let newcomers in.
gradients.py and averaging.py say what each rank brings along, and how the ranks agree again. loop.py owns one Survivor.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from gossamer import membership, runtime
from gossamer.comm import Communicator, gather_numbers
from gossamer.engine import Connections, Face, broadcast_everywhere, broadcast_state, weak_call
from gossamer.engine.agree import checksum_of
from gossamer.errors import CommError
from gossamer.membership import Member
from gossamer.regroup.data import Data
from gossamer.regroup.deadline import Deadline
from gossamer.regroup.donor import Donor
from gossamer.regroup.newcomer import Copy, OptimizerCopy

_log = logging.getLogger("gossamer")
OwnT = TypeVar("OwnT")


class Wish(IntEnum):
    """What a rank wishes for in a message that goes to all; the highest counts."""

    NOTHING = 0
    DIVISION = 1  # of what is left of the data
    CHANGE = 2  # of the group


class Survivor(ABC, Generic[OwnT]):
    """The training of one model on this worker.

    Args:
        face: the wrapped model.
        optimizers: its optimizers.
        data: what it trains on.
        deadline: how long ranks wait for one that is late.
        save: returns what a newcomer needs besides the model, as torch.save() takes it; given whether it needs the
            optimizers' states too.
        load: takes that on a newcomer.
        copy: on a newcomer, what it has copied before it entered the group; None: nothing.

    Attributes:
        changes_at: the value of `count` at which the group of what follows is another one; None: the group stays.
        has_met: whether all ranks have ended the training.
    """

    _copies_common = True  # whether _large_state() has the tensors of _common()

    def __init__(
        self,
        face: Face,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        data: Data,
        deadline: Deadline,
        save: Callable[[bool], Any],
        load: Callable[[Any], None],
        copy: Copy | None = None,
    ) -> None:
        self._face, self._optimizers, self._save, self._load = face, optimizers, save, load
        self._data, self._deadline = data, deadline
        self._copy = copy
        self._member: Member | None = membership.member()
        self._donor: Donor | None = (
            Donor(self._member, self._large_state) if self._member is not None else None
        )
        self._own: OwnT | None = None  # while there is no engine that works
        self._failed_at: int | None = None  # `count` when a group failed without a death
        self.changes_at: int | None = None
        self.has_met = False

    @property
    def control(self) -> Communicator:
        """The present group, for CPU tensors."""
        return self._face.links.control

    @property
    @abstractmethod
    def count(self) -> int:
        """What all ranks have done together so far."""

    @property
    @abstractmethod
    def wished(self) -> Wish:
        """What all ranks have learned that one of them wishes for."""

    @abstractmethod
    def wish(self, *, change: bool, grows: bool, stop: bool) -> None:
        """Say what this rank wishes for.

        Args:
            change: another group.
            grows: another group, because newcomers are ready.
            stop: another group, because all ranks are to end.
        """

    @property
    def wished_first(self) -> bool:
        """Whether the group is to change before anything else is done together. Equal on all ranks."""
        return False

    def work(self) -> Callable[[], None] | None:
        """Return what is to be done with the other ranks at this boundary; None: nothing."""
        return None

    def look(self) -> None:
        """At a boundary: begin to give the state to newcomers that ask this worker."""
        if self._donor is not None:
            self._donor.look()

    def close(self) -> None:
        """Called when the training has ended: give the state to nobody any more."""
        if self._donor is not None:
            self._donor.close()

    def finish(self) -> None:
        """Called at the boundary after the last step, which is the same on all ranks."""

    def meet(self) -> None:
        """Wait for the other ranks after the last step, and set `has_met`. Collective."""
        gather_numbers(self.control, self.count)
        self.has_met = True

    def part(self) -> None:
        """Called before this rank ends while the others go on."""

    def begin(self) -> None:
        """Bring all workers to one state: that of those who train, or rank 0's if none does. Collective.

        Raises:
            CommError: this worker has come while others trained, and all that held the state are dead.
        """
        while True:
            try:
                return self._take_part()
            except RuntimeError:  # torch's own too
                if not self._lost_place():
                    raise
            self._leave_engine(crashed=True)
            runtime.renew()
            self._engage_all()

    def change(self) -> None:
        """At a boundary: leave the group, together with all others, for the next one."""
        assert self._member is not None
        self._keep_own()
        self._member.leave("update", skip_sync=True)
        self._leave_engine(crashed=False)
        self._go_on()

    def complete_change(self) -> None:
        """At the boundary `changes_at`: divide the data anew, let newcomers in, and compare the ranks. Collective."""
        self.changes_at = None
        assert self._donor is not None
        self._donor.end_copies()
        self.at_boundary(self._welcome)

    def at_boundary(self, act: Callable[[], None]) -> bool:
        """Call a collective function between two steps. If the group loses a member, join the next one.

        Return whether the function has been completed.
        """
        try:
            act()
            return True
        except RuntimeError:  # torch's own too
            if not self._lost_place():
                raise
        self._regroup()
        return False

    def save_optimizer(self, optimizer: torch.optim.Optimizer, *, with_state: bool) -> dict[str, Any]:
        """Return what a newcomer needs of an optimizer, perhaps without the state that it has copied."""
        saved = optimizer.state_dict()
        return saved if with_state else {"param_groups": saved["param_groups"]}

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Take on a newcomer what save_optimizer() returned."""
        copied = {} if "state" in saved else {"state": optimizer.state_dict()["state"]}
        optimizer.load_state_dict(saved | copied)

    # --- what differs between ways to train ---

    @classmethod
    def copy_for(cls, face: Face, optimizers: Sequence[torch.optim.Optimizer]) -> Copy:
        """Return what takes _large_state() on a newcomer, before it has a Survivor."""
        return OptimizerCopy(optimizers)

    @abstractmethod
    def _large_state(self) -> Any:
        """Return copies of what newcomers take before they enter the group."""

    def _large_tensors(self, own: OwnT) -> list[Tensor]:
        """Return the tensors of _large_state(), or of `_copy` if there is one, that must be equal on all ranks."""
        return []

    def _divides(self) -> bool:
        """Return whether the members divide the data anew when they welcome newcomers."""
        return True

    @abstractmethod
    def _make_own(self) -> OwnT:
        """Return what this rank brings into the next group from the engine that it has."""

    @abstractmethod
    def _meet(self) -> None:
        """In the next group: bring the ranks that hold the state to one count, and set `changes_at`. Collective."""

    @abstractmethod
    def _state_of(self, own: OwnT, copied: bool) -> dict[str, Any]:
        """Return what a newcomer needs besides _common() and `save`, perhaps after it has copied _large_state()."""

    def _common(self) -> list[Tensor]:
        """Return the tensors, besides buffers, that all ranks hold alike."""
        return list(self._face.engine.params.values())

    @abstractmethod
    def _take(self, own: OwnT, state: dict[str, Any] | None) -> None:
        """Make the new engine go on, at the same time on all ranks.

        Args:
            own: of the engine before.
            state: what _state_of() returned on the source, for a rank that has no state; None: this rank has its own.
        """

    def _has_common(self) -> None:
        """Called on a newcomer that has got _common()."""

    def _arm(self) -> None:
        self._own = None
        if self._member is not None:
            self._member.holds = True
            self._watch_group()

    # --- what is common ---

    def _regroup(self) -> None:
        """Between two steps, in a group that has lost a member: join the next one."""
        if self._own is None:
            self._keep_own()
        self._leave_engine(crashed=True)
        self._go_on()

    def _lost_place(self) -> bool:
        """Return whether the group has failed so that another one may go on: it has lost a member, or one hangs.

        A group that fails at the same place as the one before, without a death, is not left again.
        """
        if runtime.lost_place():
            return True
        before, self._failed_at = self._failed_at, self.count
        return before != self._failed_at and runtime.give_place_up()

    def _keep_own(self) -> None:
        with torch.no_grad():
            self._own = self._make_own()

    def _leave_engine(self, *, crashed: bool) -> None:
        self._face.engine.close(crashed=crashed)

    def _go_on(self) -> None:
        """Enter the next group with the other holders of the state, and end what was under way."""
        assert self._member is not None
        while True:
            runtime.renew()
            try:
                return self._meet() if self._member.holds else self._rejoin()
            except RuntimeError:  # torch's own too
                if not self._lost_place():
                    raise
            self._leave_engine(crashed=True)

    def _rejoin(self) -> None:
        """Enter a group like a newcomer, after others have gone on without this rank. Collective."""
        self._engage_all()
        self._take_part()

    def _take_part(self) -> None:
        self._share()
        self._compare()
        self._arm()

    def _connect_holders(self) -> Connections:
        """Return connections among the ranks of the present group that hold the state."""
        assert self._member is not None
        holders = self._member.holders()
        return self._face.connect() if len(holders) == runtime.size() else self._face.connect(holders)

    def _watch_group(self) -> None:
        """Let the driver's word that the group is broken end all waits in it."""
        assert self._member is not None
        self._member.on_lost_group(weak_call(weakref.WeakMethod(self._face.engine.lose_group)))

    def _welcome(self) -> None:
        member = self._member
        assert member is not None
        self._data.welcome(self.control, divides=self._divides())
        if len(member.holders()) < runtime.size():
            self._keep_own()
            self._leave_engine(crashed=False)
            self._engage_all()
            self._share()
        self._compare()
        self._arm()

    def _engage_all(self) -> None:
        self._face.engage(self._face.connect(), self._optimizers, restored=runtime.state_lives())

    def _share(self) -> None:
        """Copy the state of the first rank that holds one to all ranks that hold none. Collective."""
        member, engine = self._member, self._face.engine
        holders = member.holders() if member is not None else []
        if member is not None and member.awaits_state and not holders:
            self._no_holder(member)
        source = holders[0] if holders else 0
        links, own = self._face.links, self._own or self._make_own()
        control = links.control
        if control.size == 1:
            if self._own is not None:
                self._take(own, None)
            return
        has_state = control.rank in holders or control.rank == source
        copied = bool(holders) and self._have_copied(own, source, has_state)
        if holders and control.rank == source:
            assert member is not None
            assert member.seat is not None
            new = [member.seat.workers[rank] for rank in range(control.size) if rank not in holders]
            how = "have copied the state while the others trained" if copied else "copy the state now"
            _log.info("elastic: workers %s %s", new, how)
        state = broadcast_state(
            control,
            lambda: self._state_of(own, copied) | {"more": self._save(not copied)},
            source,
            take=not has_state,
        )
        with torch.no_grad():
            self._take(own, state)
            # A holder keeps its own buffers, such as BatchNorm's statistics.
            keeps = has_state and control.rank != source
            buffers = [buffer.clone() if keeps else buffer for buffer in engine.buffers]
            common = [] if copied and self._copies_common else self._common()
            broadcast_everywhere(links.comm, control, [*common, *buffers], source)
            self._copy = None
            if state is not None:
                self._has_common()
                self._load(state["more"])

    def _have_copied(self, own: OwnT, source: int, has_state: bool) -> bool:
        """Return whether all ranks that hold no state have copied that of rank `source`, as it is now. Collective."""
        if not all(
            copied for [copied] in gather_numbers(self.control, int(has_state or self._copy is not None))
        ):
            return False
        asked = not has_state or self.control.rank == source
        sums = gather_numbers(self.control, int(asked), checksum_of(self._large_tensors(own)) if asked else 0)
        return all(own == sums[source][1] for asked, own in sums if asked)

    def _compare(self) -> None:
        """Raise CommError on all ranks if they differ. Collective."""
        sums = [each for [each] in gather_numbers(self.control, checksum_of(self._common()))]
        if len(set(sums)) > 1:
            self._failed_at = self.count  # another group would not help
            raise CommError(
                f"elastic: the weights of the ranks differ in the new group; their checksums are {sums}"
            )

    def _no_holder(self, member: Member) -> NoReturn:
        raise CommError(
            f"elastic: worker {member.worker} has come while others trained, and no worker that holds the state of the "
            f"training lives; begin again from a checkpoint"
        )
