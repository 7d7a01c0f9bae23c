# The driver's side of the board: torch's TCPStore, on which it writes who is in which group and reads who has left
# one. Each group also gets a store of its own to come together in, so that closing it frees those who wait there for
# a worker that is dead. Used by driver.py; the workers' side, and the meaning of the keys, is gossamer/membership.py.
"""What an elastic driver and its workers tell each other."""

import json
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gossamer.membership import LOCAL, PREFIX, STATE, answer_key, epoch_key, worker_key

GRACE_S = 2.0  # those who look up in a broken group's store who is missing still find it


@dataclass(frozen=True)
class News:
    """The last word of a worker. left: the group it has left; 0 if it has not been in any."""

    left: int
    reason: str
    skip_sync: bool


class Board:
    """Serves the board, on all addresses of this host."""

    def __init__(self) -> None:
        self._server = _serve()
        self._store = dist.PrefixStore(PREFIX, self._server)
        self._state: dict[str, Any] = {"epoch": 0, "broken": 0, "update": None}
        self._groups: dict[int, dist.TCPStore] = {}
        self._closing: list[tuple[float, dist.TCPStore]] = []
        self._write()

    @property
    def endpoint(self) -> str:
        """For workers on this host."""
        return f"{LOCAL}:{self._server.port}"

    def admit(self, worker: int) -> None:
        """Makes a place for the worker's news, and for an answer."""
        self._store.set(worker_key(worker), "")
        self._store.set(answer_key(worker), "")

    def answer(self, worker: int, seats: dict[int, dict[str, int]] | None) -> None:
        """Answers a worker that has announced itself: the places as they would be with it; None: it is seated."""
        self._store.set(answer_key(worker), json.dumps(seats))

    def news(self, workers: list[int]) -> dict[int, News]:
        """Of those that have said something."""
        texts = self._store.multi_get([worker_key(worker) for worker in workers]) if workers else []
        return {worker: News(**json.loads(text)) for worker, text in zip(workers, texts, strict=True) if text}

    def publish(
        self, epoch: int, *, seats: dict[int, dict[str, int]], removed: list[int], sync: bool
    ) -> None:
        """A new group: its workers in rank order with their places, and those that are to go."""
        self.close_group(epoch - 1)
        self._groups[epoch] = store = _serve()
        group = {
            "seats": seats,
            "removed": removed,
            "sync": sync,
            "port": store.port,
        }
        self._store.set(epoch_key(epoch), json.dumps(group))
        self._state |= {"epoch": epoch, "update": None}
        self._write()

    def declare_broken(self, epoch: int) -> None:
        """The group has lost a member."""
        if self._state["broken"] < epoch:
            self._state["broken"] = epoch
            self._write()
            self.close_group(epoch)

    def announce_update(self, epoch: int, *, kind: str) -> None:
        """The members of this group should leave it together, soon. kind: "added" or "removed"."""
        update = {"epoch": epoch, "kind": kind}
        if self._state["update"] != update:
            self._state["update"] = update
            self._write()

    def close_group(self, epoch: int) -> None:
        """A moment later, the store of this group ends; call tidy() until then."""
        if (store := self._groups.pop(epoch, None)) is not None:
            self._closing.append((time.monotonic() + GRACE_S, store))

    def tidy(self) -> None:
        self._closing = [(due, store) for due, store in self._closing if due > time.monotonic()]

    def _write(self) -> None:
        self._store.set(STATE, json.dumps(self._state))


def _serve() -> dist.TCPStore:
    return dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
