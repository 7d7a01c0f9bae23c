"""A worker that has come while others train copies their state before it enters their group."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gossamer import late_entry, membership, runtime
from gossamer.errors import CommError
from gossamer.membership import ASK_S, Member
from gossamer.regroup.channel import Channel, Kind
from gossamer.regroup.donor import UP_TO_DATE, copied, giver_in


class Copy(Protocol):
    """What takes the state on a newcomer."""

    def take(self, state: Any) -> None:
        """Take all of the state."""
        ...

    def change(self, change: Any) -> None:
        """Take what a step has changed."""
        ...


class OptimizerCopy:
    """A Copy of the states of optimizers.

    Args:
        optimizers: the newcomer's own, as the others have them.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def state(self) -> dict[str, Any]:
        """Return copies of the present state, as take() takes it."""
        return {"optimizers": copied([optimizer.state_dict() for optimizer in self._optimizers])}

    def take(self, state: dict[str, Any]) -> None:
        """See Copy."""
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def change(self, change: Any) -> None:
        """See Copy. Where ranks train apart, steps change nothing that all hold alike."""


def enter_with(copy: Copy) -> bool:
    """Copy the state of the training from a member that trains on, and enter its group.

    The copy goes on while this worker waits for its place. Returns whether it is whole: as the state was when the
    worker had its place.

    Raises:
        CommError: the driver is gone.
    """
    member = membership.member()
    assert member is not None
    while True:
        copying = _Copying(member, copy)
        if copying.is_ready():
            late_entry.enter_now()
            return copying.is_whole()
        if member.lost_driver:
            raise CommError(member.lost_driver)


class _Copying:
    """A copy that is under way, on a thread of its own."""

    def __init__(self, member: Member, copy: Copy) -> None:
        self._member, self._copy = member, copy
        self._ready = threading.Event()  # it is up to date for a moment, or has ended
        self._goes_well, self._whole = True, False
        self._giver: int | None = None
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="gossamer-newcomer", daemon=True)
        self._thread.start()

    def is_ready(self) -> bool:
        """Wait until the state is up to date. Return False if the member that gives it is gone before."""
        self._ready.wait()
        return self._goes_well

    def is_whole(self) -> bool:
        """In a group: wait for the end of the copy. Return whether it has ended well.

        If the group loses a member meanwhile, enter the next one.
        """
        while self._thread.is_alive():
            seat = self._member.seat
            assert seat is not None
            if self._member.lost_driver:
                raise CommError(self._member.lost_driver)
            if self._member.broken and runtime.lost_place():
                runtime.renew()
            elif self._giver not in seat.workers and self._channel is not None:
                self._channel.end()  # the giver was late, and left out
            self._thread.join(ASK_S)
        return self._whole

    def _run(self) -> None:
        try:
            store = self._member.copy_store(self._member.worker, self._member.ask_for_copy())
            while (giver := giver_in(store)) is None:
                if self._member.lost_driver:
                    raise CommError(self._member.lost_driver)
                time.sleep(ASK_S)
            self._giver = giver
            self._channel = Channel(store, gives=False)
            self._whole = self._take_all(self._channel)
        except RuntimeError:  # torch's own too
            self._goes_well = self._ready.is_set()
        finally:
            self._ready.set()

    def _take_all(self, channel: Channel) -> bool:
        while True:
            message = channel.receive()
            if message.kind is Kind.STATE:
                self._copy.take(message.content)
            elif message.kind is Kind.STEP:
                self._copy.change(message.content)
            else:
                return message.kind is Kind.WHOLE
            if message.left <= UP_TO_DATE:
                self._ready.set()
