# The driver's side of the board. The board is a TCPStore of torch's: the driver writes there which workers are in a
# group, and reads which workers have left one. Each group meets in a store of its own, so that closing that store
# frees the workers that wait there for a dead one. Used by driver.py. gossamer/membership.py is the workers' side,
# and explains the keys.
"""What an elastic driver and its workers tell each other."""

import json
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gossamer import stores
from gossamer.membership import LOCAL, PREFIX, STATE, answer_key, epoch_key, late_key, stops_key, worker_key

GRACE_S = 2.0  # for workers that still look up in a broken group's store which rank is missing


@dataclass(frozen=True)
class News:
    """The last message of a worker.

    ``left`` is the group that it has left, or 0 if it has been in none. ``attempt`` says how often it has asked for the
    state of the training.
    """

    left: int
    reason: str
    skip_sync: bool
    attempt: int = 0


class Board:
    """The board.

    Args:
        address: by which all workers reach this host. The board and the groups' stores listen there alone. None: the
            hosts of the workers do not show one, so they listen on every address of this host.
    """

    def __init__(self, *, address: str | None = LOCAL) -> None:
        self._address = address
        self._server = self._serve()
        self._store = dist.PrefixStore(PREFIX, self._server)
        self._state: dict[str, Any] = {"epoch": 0, "broken": 0, "update": None, "copying": {}}
        self._groups: dict[int, dist.TCPStore] = {}
        self._closing: list[tuple[float, dist.TCPStore]] = []
        self._write()

    @property
    def endpoint(self) -> str:
        """The board's address: for all workers, or for those on this host if it listens on every address."""
        return f"{self._address or LOCAL}:{self._server.port}"

    def admit(self, worker: int) -> None:
        """Makes keys for a worker's messages and for the answer to it."""
        self._store.set(worker_key(worker), "")
        self._store.set(answer_key(worker), "")
        self._store.set(stops_key(worker), "")

    def end_when_told(self, workers: list[int]) -> bool:
        """Returns whether these workers end by themselves when STOP is announced.

        They do if one has said so: all run the same program, and a newcomer is in the group before it comes so far.
        """
        return any(self._store.multi_get([stops_key(worker) for worker in workers])) if workers else False

    def answer(self, worker: int, seats: dict[int, dict[str, int]] | None) -> None:
        """Answers a worker that has announced itself: the places as they would be with it, or None if it has one."""
        self._store.set(answer_key(worker), json.dumps(seats))

    def news(self, workers: list[int]) -> dict[int, News]:
        """Returns the last message of each worker that has sent one."""
        texts = self._store.multi_get([worker_key(worker) for worker in workers]) if workers else []
        return {worker: News(**json.loads(text)) for worker, text in zip(workers, texts, strict=True) if text}

    def has_late_member(self, epoch: int) -> bool:
        """Returns whether a member of this group has waited for another one for too long."""
        return bool(self._store.check([late_key(epoch)]))

    def publish(
        self, epoch: int, *, seats: dict[int, dict[str, int]], removed: list[int], sync: bool
    ) -> None:
        """Publishes a new group: the places of its workers in rank order, and the workers that must leave."""
        self.close_group(epoch - 1)
        self._groups[epoch] = store = self._serve()
        group = {"seats": seats, "removed": removed, "sync": sync, "port": store.port}
        self._store.set(epoch_key(epoch), json.dumps(group))
        self._state |= {"epoch": epoch, "update": None}
        self._write()

    def declare_broken(self, epoch: int) -> None:
        """Says that the group has lost a member."""
        if self._state["broken"] < epoch:
            self._state["broken"] = epoch
            self._write()
            self.close_group(epoch)

    def announce_update(self, epoch: int, *, kind: str) -> None:
        """Asks the members of this group to leave it together, soon. ``kind`` is "added", "removed" or STOP."""
        self._change("update", {"epoch": epoch, "kind": kind})

    def announce_copying(self, attempts: dict[int, int]) -> None:
        """Tells the members which workers have asked for the state of the training, and how often each has."""
        self._change("copying", {str(worker): attempt for worker, attempt in attempts.items()})

    def close_group(self, epoch: int) -> None:
        """Ends the store of this group after GRACE_S; tidy() does it."""
        if (store := self._groups.pop(epoch, None)) is not None:
            self._closing.append((time.monotonic() + GRACE_S, store))

    def tidy(self) -> None:
        self._closing = [(due, store) for due, store in self._closing if due > time.monotonic()]

    def _change(self, key: str, value: Any) -> None:
        if self._state[key] != value:
            self._state[key] = value
            self._write()

    def _write(self) -> None:
        self._store.set(STATE, json.dumps(self._state))

    def _serve(self) -> dist.TCPStore:
        if self._address is not None:
            return stores.serve(self._address, wait_for_workers=False)
        return dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
