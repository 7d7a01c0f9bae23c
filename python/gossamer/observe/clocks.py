"""Brings the ranks' parts of a trace to rank 0, and measures how far each rank's clock is from rank 0's.

Parts travel through the store of the rendezvous, so this works on any number of hosts, and a dead rank holds up nobody:
every wait has a limit. Times are nanoseconds of each rank's own steady clock. timeline.py uses this module.
"""

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROUND_TRIPS = 16
ANSWER_S = 5.0  # limit between two messages of one rank
POLL_S = 0.005
CHUNK_BYTES = 1 << 20  # size of one value in a store


@dataclass(frozen=True)
class Clock:
    """The nanoseconds to add to a rank's times to get rank 0's, and the largest error of that number."""

    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True)
class TraceGroup:
    """The ranks that write one trace."""

    store: Any  # a torch.distributed.Store; None where one rank is alone
    rank: int
    size: int


def boot_id() -> str:
    """Return a text that is equal in all processes with the same steady clock; empty if it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def smallest(trips: list[tuple[int, int, int]], *, same_clock: bool) -> Clock:
    """Return the clock that the shortest round trip gives: rank 0 read its time somewhere within the trip.

    Args:
        trips: (sent, rank 0's time, answered) in nanoseconds.
        same_clock: both ranks are on one host. Then the offset is 0, if the trip allows that.
    """
    sent, there, answered = min(trips, key=lambda trip: trip[2] - trip[0])
    offset, uncertainty = there - (sent + answered) // 2, (answered - sent + 1) // 2
    return Clock(0, 0) if same_clock and abs(offset) <= uncertainty else Clock(offset, uncertainty)


def hand_over(
    group: TraceGroup, key: str, part: dict[str, Any], now_ns: Callable[[], int], timeout_s: float
) -> bool:
    """Measure the clock and pass this rank's part to rank 0. Called on every rank but 0.

    Returns:
        False if rank 0 does not answer.
    """
    mine = f"{key}/{group.rank}"
    try:
        group.store.set(f"{mine}/here", boot_id())
        trips = []
        for turn in range(ROUND_TRIPS):
            sent = now_ns()
            group.store.set(f"{mine}/ask/{turn}", "1")
            there = _get(group.store, f"{mine}/answer/{turn}", timeout_s if turn == 0 else ANSWER_S)
            trips.append((sent, int(there), now_ns()))
        same = _get(group.store, f"{key}/boot", ANSWER_S).decode() == boot_id() != ""
        clock = smallest(trips[1:], same_clock=same)  # the first trip waits until rank 0 turns to this rank
        measured = smallest(trips[1:], same_clock=False)
        content = {**part, "clock": vars(clock), "measured": vars(measured)}
        text = zlib.compress(json.dumps(content).encode(), 1)
        chunks = [text[at : at + CHUNK_BYTES] for at in range(0, len(text), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            group.store.set(f"{mine}/part/{number}", chunk)
        group.store.set(f"{mine}/parts", str(len(chunks)))
        _get(group.store, f"{mine}/taken", timeout_s)  # a rank that hosts the store must not leave earlier
    except (RuntimeError, TimeoutError):
        return False
    return True


def collect(
    group: TraceGroup, key: str, now_ns: Callable[[], int], timeout_s: float
) -> dict[int, dict[str, Any]]:
    """Return the parts of the other ranks that come in time, by rank, each with its clock. Called on rank 0."""
    parts: dict[int, dict[str, Any]] = {}
    awaited = set(range(1, group.size))
    deadline = time.monotonic() + timeout_s
    try:
        group.store.set(f"{key}/boot", boot_id())
        while awaited and time.monotonic() < deadline:
            here = [rank for rank in sorted(awaited) if group.store.check([f"{key}/{rank}/here"])]
            for rank in here:
                awaited.remove(rank)
                part = _serve(group.store, f"{key}/{rank}", now_ns)
                if part is not None:
                    parts[rank] = part
                # Look once more at ranks that came meanwhile.
                deadline = max(deadline, time.monotonic() + POLL_S)
            if not here:
                time.sleep(POLL_S)
    except (RuntimeError, TimeoutError):
        pass  # the host of the store is gone, and so are the missing parts
    return parts


def _serve(store: Any, theirs: str, now_ns: Callable[[], int]) -> dict[str, Any] | None:
    try:
        for turn in range(ROUND_TRIPS):
            _get(store, f"{theirs}/ask/{turn}", ANSWER_S)
            store.set(f"{theirs}/answer/{turn}", str(now_ns()))
        count = int(_get(store, f"{theirs}/parts", ANSWER_S))
        text = b"".join(_get(store, f"{theirs}/part/{number}", ANSWER_S) for number in range(count))
        store.set(f"{theirs}/taken", "1")
        for leaf in [*(f"part/{number}" for number in range(count)), "parts"]:
            store.delete_key(f"{theirs}/{leaf}")
    except (RuntimeError, TimeoutError):
        return None  # it died meanwhile
    part: dict[str, Any] = json.loads(zlib.decompress(text))
    return part


def _get(store: Any, key: str, timeout_s: float) -> bytes:
    store.wait([key], timedelta(seconds=timeout_s))
    value: bytes = store.get(key)
    return value
