# The part of `gossamer doctor` in which ranks talk. They send their facts through the launcher's store, so that facts
# arrive even if no group can be joined. Then they join a group, and hosts measure the network between them. It judges
# nothing. cli.py calls it in every rank.
"""Facts of all ranks, and measurements between hosts."""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossamer import comm, runtime
from gossamer.comm.c10d import hosts_of as hosts_that_share
from gossamer.config import Placement
from gossamer.doctor import facts
from gossamer.doctor.rows import Job, Pair, hosts_of

PINGS = 20
MESSAGE_BYTES = 1 << 20
MOST_MESSAGES = 64
DIRECTION_S = 0.2  # how long the bandwidth of one direction is measured
MEASURING_S = 60  # how long all pairs may take


def examine(settings: dict[str, Any]) -> Job | None:
    """Returns the facts of all ranks, the failures and the measurements; None on ranks other than 0.

    Args:
        settings: "timeout_s": seconds for each of meeting, joining and answering; "network": whether to measure.

    Raises:
        ConfigError: a launcher's variables that contradict each other.
        CommError: the ranks' store was not reached.
    """
    timeout_s = settings["timeout_s"]
    placement, store = runtime.meet(timeout_s)
    own = facts.collect(placement)
    if placement.size == 1:
        return Job([own])
    store = dist.PrefixStore("gossamer/doctor", store)
    store.set(f"facts{placement.rank}", json.dumps(own))
    every, failures = _gather(store, "facts", placement.size, timeout_s)
    answer: dict[str, Any] = {"error": None, "pairs": [], "shared": None}
    if not failures:
        try:
            answer |= _measure(placement, store, every, settings)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
    store.set(f"answer{placement.rank}", json.dumps(answer))
    if placement.rank != 0:
        return None
    # A rank tries two ways to join, and each may take that long.
    answers, silent = _gather(store, "answer", placement.size, 2 * timeout_s + MEASURING_S)
    failures += [f"rank {rank}: {each['error']}" for rank, each in enumerate(answers) if each.get("error")]
    failures += silent
    pairs = [pair | {"ranks": tuple(pair["ranks"])} for each in answers for pair in each.get("pairs", [])]
    measured = [Pair(**pair) for pair in pairs]
    return Job([each for each in every if each], failures, measured, answers[0].get("shared"))


def _gather(store: Any, what: str, size: int, timeout_s: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns what every rank has put under a name, {} for a rank that is late, and a failure for each late rank."""
    found: list[dict[str, Any]] = []
    failures, deadline = [], time.monotonic() + timeout_s
    for rank in range(size):
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        try:
            store.wait([f"{what}{rank}"], left)
            found.append(json.loads(store.get(f"{what}{rank}")))
        except RuntimeError as error:  # also torch's DistStoreError
            found.append({})
            said = f"rank {rank} did not tell its {what} in {timeout_s:g} s: {str(error).splitlines()[0]}"
            failures.append(f"{said}; rows below count the other ranks" if what == "facts" else said)
    return found, failures


def _measure(
    placement: Placement, store: Any, every: Sequence[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    place = {name: getattr(placement, name) for name in ("rank", "size", "local_rank", "local_size")}
    runtime.join(store, **place, backend="gossamer", timeout_s=settings["timeout_s"])
    try:
        shared = hosts_that_share(comm.from_group(None))
        pairs = []
        if settings["network"]:
            for a, b in rounds(representatives(every)):
                if placement.rank in (a, b) and (pair := between(a, b, is_first=placement.rank == a)):
                    pairs.append(asdict(pair))
        return {"pairs": pairs, "shared": shared}
    finally:
        runtime.shutdown()


def representatives(every: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the first rank of every host, or the first two ranks of the only host."""
    hosts = list(hosts_of(every).values())
    return [ranks[0] for ranks in hosts] if len(hosts) > 1 else hosts[0][:2]


def rounds(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields every pair once. Neighbours in the order share no rank if possible, so that they run at the same time."""
    circle: list[int | None] = [*ranks, None] if len(ranks) % 2 else [*ranks]
    for _ in range(len(circle) - 1):
        for one, other in zip(circle[: len(circle) // 2], reversed(circle), strict=False):
            if one is not None and other is not None:
                yield min(one, other), max(one, other)
        circle = [circle[0], circle[-1], *circle[1:-1]]


def between(a: int, b: int, *, is_first: bool) -> Pair | None:
    """Measures latency, clocks and bandwidth both ways between two ranks. Both call it; the second gets None."""
    peer = b if is_first else a
    latency_s, clock_s, error_s = _pings(peer, is_first=is_first)
    there = _bandwidth(peer, sends=is_first)
    back = _bandwidth(peer, sends=not is_first)
    return Pair((a, b), latency_s, there, back, clock_s, error_s) if is_first else None


def _pings(peer: int, *, is_first: bool) -> tuple[float, float, float]:
    """Returns the seconds one way, the peer's clock minus this one's, and the error bound of that difference.

    The error bound is half of the quickest way there and back.
    """
    note = torch.zeros(1, dtype=torch.float64)
    trips, clocks = [], []
    for _ in range(PINGS + 1):  # the first makes the connection
        if is_first:
            begin = time.time()
            start_s = time.perf_counter()
            dist.send(note, peer)
            dist.recv(note, peer)
            trips.append(time.perf_counter() - start_s)
            clocks.append(note.item() - (begin + trips[-1] / 2))
        else:
            dist.recv(note, peer)
            note[0] = time.time()
            dist.send(note, peer)
    if not is_first:
        return 0.0, 0.0, 0.0
    quickest = min(range(1, PINGS + 1), key=trips.__getitem__)
    return statistics.median(trips[1:]) / 2, clocks[quickest], trips[quickest] / 2


def _bandwidth(peer: int, *, sends: bool) -> float:
    """Returns the bytes per second of large messages one way, as the sender sees them confirmed; equal on both."""
    there, back = (dist.send, dist.recv) if sends else (dist.recv, dist.send)
    message, count = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), torch.ones(1, dtype=torch.float64)

    def seconds_until_confirmed() -> float:
        start_s = time.perf_counter()
        for _ in range(int(count)):
            there(message, peer)
        back(torch.zeros(1), peer)
        return time.perf_counter() - start_s

    count[0] = min(MOST_MESSAGES, max(1, int(DIRECTION_S / seconds_until_confirmed())))
    there(count, peer)
    rate = torch.tensor([MESSAGE_BYTES * count.item() / seconds_until_confirmed()])
    there(rate, peer)
    return float(rate)
