# Elastic training for any framework: a state that can be committed and restored, and the loop that goes on with it in
# a new group when the old one has lost a worker or could grow. Who is in the group is decided by the driver of
# `gossamer run --min-np`, through gossamer.membership. Used by horovod/torch/elastic, and by users for own states.
"""States and the loop of elastic training."""

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
    """What has happened to the hosts: bits, so that several updates are joined by `|`."""

    no_res = 0
    removed = 1
    added = 2
    mixed = 3


_UPDATES = {"": HostUpdateResult.no_res, "removed": HostUpdateResult.removed, "added": HostUpdateResult.added}


class State:
    """What training must not lose. A subclass says how it is saved, restored, and made equal on all workers.

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
        """They are called, in order, whenever this worker has joined a new group and before the state is synchronised.

        Such as one that sets the learning rate for the new number of workers.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by the loop in a new group."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Lets the next commit of rank 0 know that hosts have changed; older timestamps than seen are ignored."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state in memory, and then leaves for a new group if workers wait or are to go.

        Each commit costs a copy of the state and one broadcast of a few bytes.

        Raises:
            HostsUpdatedInterrupt: on all workers at the same commit.
            HorovodInternalError: the group has lost a worker.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """commit() without saving: what was done since the last commit is kept if workers were added or removed.

        Raises:
            HostsUpdatedInterrupt: on all workers at the same call.
            HorovodInternalError: the group has lost a worker.
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
        """Goes back to the last copy."""
        raise NotImplementedError(f"{type(self).__name__}.restore: a state must say how it is restored")

    def sync(self) -> None:
        """Takes over rank 0's state on all workers, and saves it. Collective."""
        raise NotImplementedError(f"{type(self).__name__}.sync: a state must say how it is synchronised")

    def reset(self) -> None:
        """For subclasses: what must be adapted to a new group, before the callbacks."""


class ObjectState(State):
    """A state of plain objects, which are its attributes. They must be picklable, and are copied deeply.

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
    """func(state, ...) as one that survives changes of its group.

    It is called again, with the state of the last commit, when a worker has died (HorovodInternalError, or the
    CommError of Gossamer's own calls), and with the state as it is when workers were added or removed
    (HostsUpdatedInterrupt).

    Args:
        func: trains; its first argument is a State.
        reset: leaves the group, and returns when this worker is in a new one.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        if late_entry.enter_now():
            state.on_reset()  # what was made of the place that init() told, such as a learning rate, is made anew
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
    """Returns whether all members of the new group may skip the sync: never just some, for whom others would wait."""
    member = membership.member()
    if member is not None:
        member.leave(reason, skip_sync=skip_sync)
    reset()
    return member is not None and member.seat is not None and not member.seat.sync
