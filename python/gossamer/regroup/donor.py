"""Gives the state of the training to newcomers in the background, while this worker trains on.

Of the members one takes each request. A thread sends what the state was at one boundary, and then what each step has
changed. Once a newcomer is up to date it says that it is ready, and enters the next group.
"""

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from gossamer.errors import CommError
from gossamer.membership import Member
from gossamer.regroup.channel import Channel, Kind, Message
from gossamer.torch_private import tree_map_only

_log = logging.getLogger("gossamer")
# Keys of a newcomer's store: how many members want to give it the state, and the worker that does, which was the first.
_CLAIM, _GIVER = "claim", "giver"
UP_TO_DATE = 1  # messages that may wait behind the one of which a newcomer says that it is ready
LEAST_BYTES = 64 << 20  # may wait in any case: to connect takes the time of many small steps
_MOST_MISSED = 3
_END_S = 5.0
_open: "weakref.WeakSet[Donor]" = weakref.WeakSet()


def copied(state: Any) -> Any:
    """Return a state whose tensors are copies, on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


class Gift:
    """One newcomer's copy of the state: a thread that sends messages as fast as the newcomer takes them.

    Args:
        worker: the newcomer.
        state: copies, which change no more.
        store: where the newcomer waits.
    """

    def __init__(self, worker: int, state: Any, store: Any) -> None:
        self.worker: int = worker
        self.over: bool = False  # nothing more is sent
        self._waiting = deque([Message(Kind.STATE, content=state)])
        # Of changes that wait. It takes no longer to send all of the state.
        self._most_bytes = max(self._waiting[0].nbytes, LEAST_BYTES)
        self._missed = 0
        self._sends = False
        self._news = threading.Condition()  # guards the four above
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, args=(store,), name="gossamer-donor", daemon=True)
        self._thread.start()

    def miss(self) -> bool:
        """Return whether something is unsent at a moment at which the newcomer could join. The third is the last."""
        with self._news:
            if self.over or not (self._sends or self._waiting):
                return False
            self._missed += 1
            if self._missed == _MOST_MISSED:
                self._give_up()
            return True

    def change(self, change: Any) -> None:
        """Send what a step has changed. If too much waits, the copy is given up."""
        with self._news:
            self._waiting.append(Message(Kind.STEP, content=change))
            if sum(each.nbytes for each in self._waiting if each.kind is Kind.STEP) > self._most_bytes:
                self._give_up()
            self._news.notify()

    def renew(self, state: Any) -> None:
        """Send another state in place of what waits."""
        with self._news:
            self._waiting.clear()
            self._waiting.append(Message(Kind.STATE, content=state))
            self._news.notify()

    def end(self) -> None:
        """Tell the newcomer, after what waits, that it has all."""
        with self._news:
            self.over = True
            self._waiting.append(Message(Kind.WHOLE))
            self._news.notify()

    def close(self) -> None:
        """End the thread, whatever it does."""
        with self._news:
            self._give_up()
        if self._channel is not None:
            self._channel.end()
        self._thread.join(_END_S)

    def _give_up(self) -> None:
        self.over = True
        self._waiting.clear()
        self._waiting.append(Message(Kind.END))
        self._news.notify()

    def _next(self) -> Message:
        with self._news:
            self._sends = False
            self._news.wait_for(lambda: self._waiting)
            self._sends = True
            return replace(self._waiting.popleft(), left=len(self._waiting))

    def _run(self, store: Any) -> None:
        try:
            self._channel = Channel(store, gives=True)
            while True:
                message = self._next()
                self._channel.send(message)
                if message.kind in (Kind.WHOLE, Kind.END):
                    return
        except RuntimeError as error:  # torch's own too
            _log.info(
                "elastic: worker %d has not taken the state; it asks again if it lives: %s",
                self.worker,
                error,
            )
        finally:
            with self._news:
                self.over = True


class Donor:
    """The copies that this worker gives.

    Args:
        member: this worker.
        state: returns copies of the present state at a boundary.
    """

    def __init__(self, member: Member, state: Callable[[], Any]) -> None:
        self._member, self._state = member, state
        self._seen: set[tuple[int, int]] = set()
        self._gifts: list[Gift] = []
        _open.add(self)

    @property
    def gives(self) -> bool:
        """Whether a newcomer copies the state from this worker now."""
        self._gifts = [gift for gift in self._gifts if not gift.over]
        return bool(self._gifts)

    def look(self) -> None:
        """Begin the copies that are asked for. Called at a boundary, at which the state is whole."""
        seat = self._member.seat
        if seat is None:
            return
        for worker, attempt in self._member.copying.items():
            turn = (worker + attempt) % seat.placement.size == seat.placement.rank
            if not turn or (worker, attempt) in self._seen:
                continue
            self._seen.add((worker, attempt))
            try:
                store = self._member.copy_store(worker, attempt)
            except CommError:  # the driver is gone: the boundary itself says so
                return
            if store.add(_CLAIM, 1) == 1:
                store.set(_GIVER, str(self._member.worker))
                self._gifts.append(Gift(worker, self._state_on_cpu(), store))
                _log.info("elastic: gives the state to worker %d", worker)

    def changed(self, change: Any) -> None:
        """Send what a step has changed. Its tensors are copied."""
        change = copied(change)
        for gift in self._gifts:
            if not gift.over:
                gift.change(change)

    def miss(self) -> bool:
        """Return whether something is unsent to a newcomer at a moment at which it could join. See Gift.miss()."""
        missed = [gift.miss() for gift in self._gifts]
        return any(missed)

    def renew(self) -> None:
        """Send all of the present state, in place of what waits. Called at a boundary."""
        state = self._state_on_cpu()
        for gift in self._gifts:
            if not gift.over:
                gift.renew(state)
                _log.info("elastic: gives the state to worker %d", gift.worker)

    def _state_on_cpu(self) -> Any:
        return tree_map_only(Tensor, Tensor.cpu, self._state())

    def end_copies(self) -> None:
        """Tell the newcomers that are in the present group by now that their copies are whole."""
        seat = self._member.seat
        for gift in self._gifts:
            if seat is not None and gift.worker in seat.workers and not gift.over:
                gift.end()

    def close(self) -> None:
        """End all copies."""
        gifts, self._gifts = self._gifts, []
        for gift in gifts:
            gift.close()


def giver_in(store: Any) -> int | None:
    """Return the worker that gives the state to the newcomer that waits in this store; None: nobody yet."""
    return int(store.get(_GIVER)) if store.check([_GIVER]) else None


@atexit.register
def _close_all() -> None:
    # A thread that returns from native code while the interpreter ends crashes the process.
    for donor in list(_open):
        donor.close()
