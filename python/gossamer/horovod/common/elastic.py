"""Elastic training: states that can be committed and restored, and the loop that continues in a new group.

The driver of `gossamer run --min-np` decides who is in the group (gossamer/membership.py). horovod/torch/elastic has
the states of torch models; users may subclass ``State``.
"""

import copy
import functools
import logging
import queue
from collections.abc import Callable, Sequence
from typing import Any

from gossamer import late_entry, membership
from gossamer.errors import CommError
from gossamer.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

_log = logging.getLogger("gossamer")


class HostUpdateResult:
    """How the hosts have changed. The values are bits, so that `|` joins several updates."""

    no_res = 0
    removed = 1
    added = 2
    mixed = 3


_UPDATES = {"": HostUpdateResult.no_res, "removed": HostUpdateResult.removed, "added": HostUpdateResult.added}


class State:
    """What training must not lose. A subclass defines save(), restore() and sync().

    Args:
        bcast_object: bcast_object(x) returns rank 0's x on every rank.
        get_rank: returns this worker's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Adds functions that are called, in order, in each new group before the state is synchronised.

        A callback may set the learning rate for the new number of workers, for example.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepares the state for a new group. The loop calls it."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tells the next commit of rank 0 that hosts have changed. Timestamps older than the last one are ignored."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state in memory, then ends this group if workers wait to join or are to leave.

        A commit costs a copy of the state and one broadcast of a few bytes.

        Raises:
            HostsUpdatedInterrupt: on all workers at the same commit, to end the group.
            HorovodInternalError: the group has lost a worker.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does commit() without saving. If workers were added or removed, progress since the last commit is kept.

        Raises:
            HostsUpdatedInterrupt, HorovodInternalError: as commit().
        """
        member = membership.member()
        if member is not None and member.broken:
            raise HorovodInternalError(member.broken)
        update = _UPDATES[member.update] if member is not None else HostUpdateResult.no_res
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                update |= result
        # Rank 0 decides, so that all workers leave the group at the same commit.
        self._last_updated_timestamp, update = self._bcast_object((self._last_updated_timestamp, update))
        if update != HostUpdateResult.no_res:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def save(self) -> None:
        """Keeps a copy of the state in memory."""
        raise NotImplementedError(f"{type(self).__name__}.save: a state must say how it is saved")

    def restore(self) -> None:
        """Returns to the last copy."""
        raise NotImplementedError(f"{type(self).__name__}.restore: a state must say how it is restored")

    def sync(self) -> None:
        """Copies rank 0's state to all workers, and saves it. Collective."""
        raise NotImplementedError(f"{type(self).__name__}.sync: a state must say how it is synchronised")

    def reset(self) -> None:
        """Adapts the state to a new group, before the callbacks. For subclasses."""


class ObjectState(State):
    """A state whose attributes are plain objects. They must be picklable, and saving copies them deeply.

    Args:
        bcast_object, get_rank: as for State.
        kwargs: the names and first values of the attributes.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        if not self._saved_state:
            return
        for name, value in self._bcast_object(
            {name: getattr(self, name) for name in self._saved_state}
        ).items():
            setattr(self, name, value)
        ObjectState.save(self)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Returns a function that calls func(state, ...) again after each change of the group.

    After a worker has died (HorovodInternalError, or the CommError of Gossamer's own calls), the state is that of the
    last commit. After workers were added or removed (HostsUpdatedInterrupt), the state is as it was.

    Args:
        func: the training function. Its first argument is a State.
        reset: leaves the group, and returns when this worker is in a new one.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        if late_entry.enter_now():
            state.on_reset()  # init() returned with another rank and size, which a learning rate may depend on
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except (HorovodInternalError, CommError) as error:
                _log.info("elastic: back to the last commit: %s", error)
                state.restore()
                skip_sync = _change_group(reset, "error", skip_sync=False)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = _change_group(reset, "update", skip_sync=interrupt.skip_sync)
            state.on_reset()

    return wrapper


def _change_group(reset: Callable[[], None], reason: str, *, skip_sync: bool) -> bool:
    """Enters a new group. Returns whether all its members may skip the sync; some alone would leave others waiting."""
    member = membership.member()
    if member is not None:
        member.leave(reason, skip_sync=skip_sync)
    reset()
    return member is not None and member.seat is not None and not member.seat.sync
