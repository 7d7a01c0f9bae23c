"""A worker's side of an elastic run, whose group changes while its processes live on.

The worker asks for a place in the group, and learns that the group has lost a member or could grow. The driver decides
(launch/elastic); they meet in a TCPStore of torch, the board. runtime.init() and the elastic loop of the Horovod face
use it. Outside an elastic run, member() is None.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossamer import config, stores
from gossamer.config import ELASTIC_VARIABLES, Placement
from gossamer.errors import CommError, ConfigError

PREFIX = "gossamer/elastic"
LOCAL = (
    "127.0.0.1"  # the address of a driver whose workers are all on its host, or that listens on every address
)
GOING = "going"  # the reason of a worker that ends, as it was told, while the others train on
ARRIVED = "arrived"  # the reason of a worker that has announced itself
COPIES = "copies"  # the reason of one that copies the state from a member, before it is ready
ADDED = "added"  # an update: newcomers are ready
STOP = "stop"  # an update: the launcher was told to end the run
STATE = "state"  # JSON (see Member._read) that the driver rewrites at every change
WATCH_S = 0.2  # between two looks at the board while training
ASK_S = 0.02  # between two looks while waiting for a place
NOTICE_S = 5.0  # how much later than the other workers the driver may notice a death
BOARD_TIMEOUT_S = 60.0
_ARRIVED = "arrived"  # key in a group's store: how many members are in meet_at_end()
SILENT_S = 30  # after which a driver's host that does not answer is lost; ssh takes as long


def epoch_key(epoch: int) -> str:
    """Key under which the driver writes a group: JSON with `seats` (by worker), `port`, `sync` and `removed`."""
    return f"epoch/{epoch}"


def worker_key(worker: int) -> str:
    """Key under which a worker writes the number of the last group it has left, why, and whether it needs a sync."""
    return f"worker/{worker}"


def stops_key(worker: int) -> str:
    """Key under which a worker says, by any text, that it ends by itself when the board says STOP."""
    return f"stops/{worker}"


def holds_key(rank: int) -> str:
    """Key in a group's own store under which a rank says whether it holds the state of the training: "1" or "0"."""
    return f"gossamer/holds/{rank}"


def late_key(epoch: int) -> str:
    """Key under which a member says, by any text, that it has waited for another member of this group for too long."""
    return f"late/{epoch}"


def answer_key(worker: int) -> str:
    """Key under which the driver answers announce(): `seats` as of a group, or null. Empty before it answers."""
    return f"answer/{worker}"


@dataclass(frozen=True)
class Seat:
    """A place in one group of workers."""

    epoch: int  # groups of this run, counted from 1
    placement: Placement
    node_rank: int
    sync: bool  # whether the members must agree on their state first; the same for all of them
    host: str  # the driver's host
    port: int  # of a store of this group alone
    workers: tuple[int, ...] = ()  # by rank

    def store(self) -> dist.Store:
        """Connects to the group's store. Raises RuntimeError if the driver has given the group up already."""
        return _client(self.host, self.port)


@dataclass(frozen=True)
class Outlook:
    """The place that a newcomer would have if the group took it in."""

    placement: Placement
    locals: list[tuple[int, int]]  # local rank and local size, by rank


class Member:
    """This process as a worker of an elastic run.

    Args:
        host, port: the address of the driver's board.
        worker: this worker's number, which it keeps whatever its rank.
        launcher: the driver's process id, on its host.

    Raises:
        CommError: the driver does not answer.
    """

    def __init__(self, host: str, port: int, *, worker: int, launcher: int) -> None:
        self.host: str = host
        self._port = port
        self.driver: str = f"{host}:{port}"
        self.worker: int = worker
        self.launcher: int = launcher
        self.seat: Seat | None = None
        self.holds: bool = False  # whether a newcomer can take the state of the training from this worker
        self._announced = False
        self._attempts = 0  # to copy the state
        self.going: bool = False  # whether this worker was told to end
        self.awaits_state: bool = False  # whether this worker has come while others trained
        self._group: dist.Store | None = None
        self._group_call: tuple[int, Callable[[], None]] | None = None
        self._calls: list[Callable[[], None]] = [abort]
        self._state: dict[str, Any] = {"epoch": 0, "broken": 0, "update": None, "copying": {}}
        self._left = -1  # the last group that this worker has told the board to have left
        self._lost = ""
        self._losing = threading.Lock()
        self._terminal = _terminal_of(launcher) if _is_here(host) else None
        with self._answered():
            self._board = dist.PrefixStore(PREFIX, _client(host, port))
        self._ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gossamer-elastic", daemon=True)
        self._watcher.start()
        atexit.register(self._end)

    def announce(self) -> Outlook | None:
        """Tells the driver that this worker exists, before it is ready to take part.

        A group that trains continues without this worker until it calls take_seat(). Returns the place that this worker
        would have in it; None if no group trains, or if this worker has been in one. Raises as take_seat().
        """
        if self.seat is not None or self._announced:
            return None
        self._announced = True
        self._write(left=0, reason=ARRIVED, skip_sync=False)
        answer = b""
        while not answer:
            time.sleep(ASK_S)
            with self._answered():
                answer = self._board.get(answer_key(self.worker))
        seats = json.loads(answer)
        if seats is None:
            return None
        self.awaits_state = True
        by_rank = sorted(seats.values(), key=lambda seat: seat["rank"])
        return Outlook(
            _placement(seats[str(self.worker)], len(seats)),
            [(seat["local_rank"], seat["local_size"]) for seat in by_rank],
        )

    def ask_for_copy(self) -> int:
        """Asks the members for the state of the training. Returns how often this worker has asked, from 1.

        The group continues without this worker until it calls take_seat(). Raises as take_seat().
        """
        self._attempts += 1
        self._write(left=0, reason=COPIES, skip_sync=False, attempt=self._attempts)
        return self._attempts

    @property
    def copying(self) -> dict[int, int]:
        """By worker that has asked for the state of the training: how often it has asked."""
        return {int(worker): attempt for worker, attempt in self._state["copying"].items()}

    def copy_store(self, worker: int, attempt: int) -> dist.Store:
        """Connects to a store in which a worker that has asked for the state meets the member that gives it.

        Raises CommError if the driver does not answer.
        """
        with self._answered():
            return dist.PrefixStore(f"{PREFIX}/copy/{worker}/{attempt}", _client(self.host, self._port))

    def enter(self, join: Callable[[Seat, dist.Store], None]) -> None:
        """Joins the next group by join(seat, store). If that group loses a member, joins the one after it.

        Raises as take_seat(), and as join() for a group that has not lost a member.
        """
        while True:
            seat = self.take_seat()
            # Others have trained on without this worker if there was a group in between: it was late.
            self.holds = self.holds and seat.epoch == self._left + 1
            try:
                self._group = seat.store()
                self._group.set(holds_key(seat.placement.rank), "1" if self.holds else "0")
                return join(seat, self._group)
            except RuntimeError:  # a CommError too
                if not self.lost_group():
                    raise

    def holders(self) -> list[int]:
        """Returns the ranks of the present group that held the state of the training when they entered it.

        Raises:
            CommError: the group has lost a member before it said so.
        """
        assert self._group is not None
        assert self.seat is not None
        ranks = range(self.seat.placement.size)
        try:
            return [rank for rank in ranks if self._group.get(holds_key(rank)) == b"1"]
        except RuntimeError as error:
            raise CommError(
                f"elastic: the members of group {self.seat.epoch} have not all come: {error}"
            ) from error

    def meet_at_end(self) -> bool:
        """Waits for all members of the present group to call this. Returns False if all are to end before.

        Raises:
            CommError: the group has lost a member.
        """
        assert self._group is not None
        assert self.seat is not None
        size = self.seat.placement.size
        try:
            arrived = self._group.add(_ARRIVED, 1)
            while arrived < size and not self.stops:
                if self.broken:
                    raise CommError(self.broken)
                time.sleep(ASK_S)
                arrived = self._group.add(_ARRIVED, 0)
            # Once all have been here they may be gone, so this rank must not go back.
            return arrived >= size or self._group.add(_ARRIVED, -1) + 1 >= size
        except RuntimeError:  # the driver's store may be gone
            if self.lost_group() or not self.stops:
                raise
            return False

    def take_seat(self) -> Seat:
        """Leaves the old group, and waits until the driver gives this worker a place in a new one.

        Raises:
            CommError: the driver does not answer.
            SystemExit: with code 0, because this worker's slot has been taken away, or the worker was told to end.
        """
        self.leave("restart", skip_sync=False)
        seen = 0
        while True:
            with self._answered():
                epoch = self._read()["epoch"]
                group = json.loads(self._board.get(epoch_key(epoch))) if epoch > max(seen, self._left) else {}
            seen = max(seen, epoch)
            if own := group.get("seats", {}).get(str(self.worker)):
                place = _placement(own, len(group["seats"]))
                workers = tuple(
                    sorted(map(int, group["seats"]), key=lambda each: group["seats"][str(each)]["rank"])
                )
                self.seat = Seat(
                    epoch, place, own["node_rank"], group["sync"], self.host, group["port"], workers
                )
                return self.seat
            if self.worker in group.get("removed", ()):
                raise SystemExit(0)
            if self.going:
                self._write(left=self._left, reason=GOING, skip_sync=True)
                raise SystemExit(0)
            time.sleep(ASK_S)

    def ends_when_told(self) -> None:
        """Tells the driver that this worker ends by itself when the board says STOP."""
        with self._answered():
            self._board.set(stops_key(self.worker), "1")

    def leave(self, reason: str, *, skip_sync: bool) -> None:
        """Tells the driver that this worker has left its group, once for each group.

        Args:
            reason: "error" if the group can no longer be used, which the driver tells the others; "update" if all
                leave together for a new group; "restart" for a user's own shutdown() and init(); GOING if this worker
                ends, and the others leave for a group without it.
            skip_sync: this worker's state needs no agreement with the others.
        """
        epoch = self.seat.epoch if self.seat is not None else 0
        if self._left < epoch:
            self._left = epoch
            self._write(left=epoch, reason=reason, skip_sync=skip_sync)

    def complain(self) -> None:
        """Tells the driver that this worker has waited for another one for too long. Any thread.

        The driver ends the group, and forms the next one without the members that do not come soon.
        """
        if self.seat is not None:
            with contextlib.suppress(CommError), self._answered():
                self._board.set(late_key(self.seat.epoch), "1")

    @property
    def lost_driver(self) -> str:
        """Why this worker has lost the driver, or an empty string."""
        return self._lost

    @property
    def broken(self) -> str:
        """Why this worker's group can no longer be used, or an empty string."""
        if self._lost:
            return self._lost
        if self.seat is None or self._state["broken"] < self.seat.epoch:
            return ""
        return f"elastic: group {self.seat.epoch} of this run, of {self.seat.placement.size} workers, has lost a member"

    def lost_group(self) -> bool:
        """Returns whether an error while the group came together is the loss of a member. If so, leaves the group."""
        until = time.monotonic() + NOTICE_S
        while not self.broken and time.monotonic() < until:
            time.sleep(ASK_S)
            with contextlib.suppress(CommError), self._answered():  # sooner than the watcher
                self._read()
        if self._lost or not self.broken:
            return False
        self.leave("error", skip_sync=False)
        return True

    @property
    def update(self) -> str:
        """ "added" or "removed" if workers wait to be taken in, or some are to go; STOP if all are; else empty."""
        update = self._state["update"]
        fresh = update is not None and self.seat is not None and update["epoch"] == self.seat.epoch
        return update["kind"] if fresh else ""

    @property
    def stops(self) -> bool:
        """Whether all workers are to end: they are told to, or the driver is gone."""
        return self.update == STOP or bool(self._lost)

    def on_broken(self, call: Callable[[], None]) -> None:
        """Registers a function that is called, on another thread, once for each group that loses a member."""
        if call not in self._calls:
            self._calls.append(call)

    def on_lost_group(self, call: Callable[[], None]) -> None:
        """Registers the one function that is called, on another thread, if the present group loses a member."""
        assert self.seat is not None
        self._group_call = self.seat.epoch, call

    def _write(self, **news: Any) -> None:
        with self._answered():
            self._board.set(worker_key(self.worker), json.dumps(news))

    def _read(self) -> dict[str, Any]:
        """Returns what the driver says.

        epoch: the newest group; broken: the newest that has lost a member; update: {epoch, kind} or None; copying: by
        worker that copies the state, how often it has asked for it.
        """
        self._state = json.loads(self._board.get(STATE))
        return self._state

    def _watch(self) -> None:
        told = 0
        while not (self._lost or self._ending.is_set()):
            with contextlib.suppress(CommError), self._answered():  # _answered() keeps the error in _lost
                self._read()
            if self.broken and self.seat is not None and told < self.seat.epoch:
                told = self.seat.epoch
                # The calls may take seconds, in which the next group may break too.
                threading.Thread(target=self._tell_broken, args=(told,)).start()
            self._ending.wait(WATCH_S)

    def _end(self) -> None:
        # A thread that returns from native code while the interpreter ends crashes the process.
        self._ending.set()
        self._watcher.join(NOTICE_S)

    def _tell_broken(self, epoch: int) -> None:
        of_group = self._group_call
        if of_group is not None and of_group[0] == epoch and not self._lost:  # the group itself still works
            of_group[1]()
        for call in list(self._calls):
            if self.seat is not None and self.seat.epoch > epoch:
                return  # the calls end whatever group there is now
            with contextlib.suppress(RuntimeError):  # what is aborted may be ending by itself
                call()

    @contextlib.contextmanager
    def _answered(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            with self._losing:
                if not self._lost:
                    who = f"worker {self.worker}"
                    if self.seat is not None:
                        who += f" (rank {self.seat.placement.rank} of {self.seat.placement.size})"
                    how = "does not answer" if isinstance(error, dist.DistStoreError) else "is gone"
                    self._lost = (
                        f"elastic: {who} has lost the driver of this run at {self.driver}: "
                        f"`gossamer run`, process {self.launcher}, {how}; this worker ends"
                    )
                    self._say(self._lost)
            raise CommError(self._lost) from error

    def _say(self, text: str) -> None:
        """Writes to the launcher's terminal too, because a launcher that is gone shows no output of workers."""
        print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # the terminal is gone too
            if self._terminal is not None and not os.path.sameopenfile(self._terminal, 2):
                os.write(self._terminal, f"{text}\n".encode())


def _client(host: str, port: int) -> dist.TCPStore:
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=BOARD_TIMEOUT_S))
    stores.fail_when_silent(host, port, after_s=SILENT_S)
    return store


def _placement(seat: dict[str, int], size: int) -> Placement:
    return Placement("elastic", seat["rank"], size, seat["local_rank"], seat["local_size"])


def _is_here(address: str) -> bool:
    """Returns whether an address belongs to this host."""
    try:
        with socket.create_server((address, 0)):
            return True
    except OSError:
        return False


def _terminal_of(launcher: int) -> int | None:
    """Returns a descriptor of what the launcher's stderr goes to. None if it cannot be opened, such as a socket."""
    try:
        return os.open(f"/proc/{launcher}/fd/2", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return None


_member: Member | None = None


def member() -> Member | None:
    """Returns this process as a worker of an elastic run, always the same object; None in any other run."""
    global _member
    if _member is None and (given := config.variables("GOSSAMER_ELASTIC_")):
        host, _, port = given.get(ELASTIC_VARIABLES[0], "").rpartition(":")
        worker = given.get(ELASTIC_VARIABLES[1], "")
        launcher = given.get(ELASTIC_VARIABLES[2], "")
        if not host or not (port.isdigit() and worker.isdigit() and launcher.isdigit()):
            raise ConfigError(
                f"environment: {', '.join(ELASTIC_VARIABLES)} must be host:port and two numbers, got {given}; "
                f"an elastic `gossamer run` sets them"
            )
        _member = Member(host, int(port), worker=int(worker), launcher=int(launcher))
    return _member


def abort() -> None:
    """Ends the waits in collectives of the default group with an error, if its backend can do that."""
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()
