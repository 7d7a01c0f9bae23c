# Parts of a trace on their way to rank 0, and how far each rank's clock is from rank 0's. Over the store that the ranks
# met through, so it works on any number of hosts and needs no communication that a dead rank could hold up: every wait
# is bounded. Used by timeline.py. Times are nanoseconds of each rank's own steady clock.
"""The exchange between the ranks when a timeline ends."""

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROUND_TRIPS = 16
ANSWER_S = 5.0  # between two messages of one rank that is being served
POLL_S = 0.005
CHUNK_BYTES = 1 << 20  # of one value in a store


@dataclass(frozen=True)
class Clock:
    """What to add to a rank's times to have rank 0's, and by how much that may be wrong."""

    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True)
class TraceGroup:
    """The ranks that write one trace."""

    store: Any  # torch.distributed.Store
    rank: int
    size: int


def boot_id() -> str:
    """The same in all processes whose steady clocks are one; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def smallest(trips: list[tuple[int, int, int]], *, same_clock: bool) -> Clock:
    """Of round trips (sent, rank 0's time, answered), the shortest: rank 0's time was somewhere within it.

    same_clock: both are on one host; then the clocks are one, if that is not further off than the trip allows.
    """
    sent, there, answered = min(trips, key=lambda trip: trip[2] - trip[0])
    offset, uncertainty = there - (sent + answered) // 2, (answered - sent + 1) // 2
    return Clock(0, 0) if same_clock and abs(offset) <= uncertainty else Clock(offset, uncertainty)


def hand_over(
    group: TraceGroup, key: str, part: dict[str, Any], now_ns: Callable[[], int], timeout_s: float
) -> bool:
    """On every rank but 0: measures the clock and gives rank 0 this rank's part. False if rank 0 does not answer."""
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
        clock = smallest(trips[1:], same_clock=same)  # the first waits for its turn
        measured = smallest(trips[1:], same_clock=False)
        content = {**part, "clock": vars(clock), "measured": vars(measured)}
        text = zlib.compress(json.dumps(content).encode(), 1)
        chunks = [text[at : at + CHUNK_BYTES] for at in range(0, len(text), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            group.store.set(f"{mine}/part/{number}", chunk)
        group.store.set(f"{mine}/parts", str(len(chunks)))
        _get(group.store, f"{mine}/taken", timeout_s)  # whoever serves the store must not leave before
    except (RuntimeError, TimeoutError):
        return False
    return True


def collect(
    group: TraceGroup, key: str, now_ns: Callable[[], int], timeout_s: float
) -> dict[int, dict[str, Any]]:
    """On rank 0: the parts of the other ranks, by rank, as far as they come in time; each has its clock."""
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
                deadline = max(deadline, time.monotonic() + POLL_S)  # whoever was here meanwhile is looked at
            if not here:
                time.sleep(POLL_S)
    except (RuntimeError, TimeoutError):
        pass  # whoever serves the store is gone: so are the parts that are missing
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


def of_default_group(store: Callable[[], Any]) -> TraceGroup | None:
    """The ranks of torch's default group; None where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return TraceGroup(store(), dist.get_rank(), dist.get_world_size())
