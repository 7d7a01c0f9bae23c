# It starts no process and sets no target. Callers: the modules of `gossamer bench` and, in a checkout,
# benchmarks/harness.py.
"""Timing in turns, medians and ratios, and the JSON line of a result."""

import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gossamer import _C

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Turns:
    """The figures of one body, one for each turn: median and mean time of a call, mean processor time of a call."""

    seconds: list[float] = field(default_factory=list)
    mean_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def interleaved(
    bodies: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeats: int,
    before: Callable[[], object] = lambda: None,
    untimed: int = 1,
) -> dict[str, Turns]:
    """Times the bodies in turns, so that other work on the machine slows all of them alike.

    Every body is first called twice. A turn calls one body `untimed` times and then `repeats` times. Each round begins
    with the next body.

    Args:
        before: called before each turn, for example a barrier between ranks.
    """
    names = list(bodies)
    turns = {name: Turns() for name in names}
    for body in bodies.values():
        body()
        body()
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before()
            for _ in range(untimed):
                bodies[name]()
            calls, cpu_start_s = [], time.process_time()
            for _ in range(repeats):
                start_s = time.perf_counter()
                bodies[name]()
                calls.append(time.perf_counter() - start_s)
            turns[name].seconds.append(statistics.median(calls))
            turns[name].mean_seconds.append(statistics.fmean(calls))
            turns[name].cpu_seconds.append((time.process_time() - cpu_start_s) / repeats)
    return turns


def slowest(turns: Mapping[str, Turns], *, mean: bool = False) -> dict[str, list[float]]:
    """Returns the median (or mean) seconds of each turn on the slowest rank. A collective of the default group."""
    mine = {name: each.mean_seconds if mean else each.seconds for name, each in turns.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {name: [max(each) for each in zip(*(of[name] for of in ranks), strict=True)] for name in mine}


def paired(seconds: Sequence[float], of: Sequence[float]) -> list[float]:
    """Returns the ratio of each round. On a busy machine the median of these is steadier than the ratio of medians."""
    return [mine / other for mine, other in zip(seconds, of, strict=True)]


def spread(samples: Sequence[float]) -> float:
    """Returns the distance between the quartiles; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def copy_of(moved: int, device: str) -> Callable[[], object]:
    """Returns a function that copies: it reads and writes `moved` bytes in all. The roofline of such an operation."""
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    out = torch.empty_like(source)
    return lambda: out.copy_(source)


def as_one(body: Callable[[], object], calls: int, device: str) -> Callable[[], object]:
    """Returns a function that calls body `calls` times and waits. On a GPU it replays a CUDA graph: no launch costs."""
    if device == "cpu":

        def run() -> None:
            for _ in range(calls):
                body()

        return run

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # everything is loaded and allocated before the capture
        body()
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            body()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def result(
    what: str,
    value: float,
    *,
    unit: str,
    benchmark: str,
    baseline: tuple[str, float] | None = None,
    ratio: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    target_of: str = "value",
    samples: Sequence[float] = (),
    **more: Any,
) -> dict[str, Any]:
    """Returns one result, as emit() prints it.

    Args:
        value: the figure; a median if `samples` are given, which have the same unit.
        baseline: name and value of the peer, measured in the same run.
        ratio: None: value / baseline. For timings, the median of the turns' ratios is better.
        at_least, at_most: the target. The field `met` says whether it is met. None: no target.
        target_of: "value" or "ratio": which of them has the target.
        more: further fields, which come last.
    """
    name, peer = baseline if baseline else (None, None)
    if ratio is None and peer:
        ratio = value / peer
    judged = value if target_of == "value" else ratio
    met = None
    if judged is not None and at_least is not None:
        met = judged >= at_least
    elif judged is not None and at_most is not None:
        met = judged <= at_most
    line: dict[str, Any] = {"benchmark": benchmark, "what": what}
    line |= {"value": short(value), "unit": unit, "baseline": name, "baseline_value": short(peer)}
    line |= {"ratio": short(ratio), "at_least": at_least, "at_most": at_most}
    line |= {"target_of": target_of, "met": met}
    if samples:
        line |= {"median": short(statistics.median(samples)), "spread": short(spread(samples))}
        line |= {"samples": len(samples)}
    return line | more


def compared(
    what: str, times: Mapping[str, Sequence[float]], name: str, peer: str, *, scale: float, **more: Any
) -> dict[str, Any]:
    """Returns the result of one contender, with its peer as baseline: how many times as fast it is, turn by turn.

    Args:
        times: the seconds of each turn, by contender.
        scale: units of the result in a second.
        more: further arguments of result().
    """
    own, others = times[name], times[peer]
    baseline = None if name == peer else (peer, scale * statistics.median(others))
    return result(
        what,
        scale * statistics.median(own),
        baseline=baseline,
        ratio=None if name == peer else statistics.median(paired(others, own)),
        samples=[scale * each for each in own],
        ratio_is=f"{peer} / {name}",
        **more,
    )


def place(device: str = "cpu") -> dict[str, Any]:
    """Returns where a figure was taken: the machine, and its load in the last minute."""
    gpu = {"device": torch.cuda.get_device_name()} if device == "cuda" else {}
    machine = {"torch": torch.__version__, "machine": f"{_processor()}, {os.cpu_count()} cores"}
    return gpu | machine | {"instruction_set": _C.instruction_set(), "load": round(os.getloadavg()[0], 1)}


def emit(line: Mapping[str, Any]) -> None:
    """Prints a result as one line of JSON on stdout."""
    print(json.dumps(line), flush=True)


def note(text: str) -> None:
    """Prints a note for the reader on stderr."""
    print(text, file=sys.stderr, flush=True)


def short(value: float | None) -> float | None:
    """Rounds a float to five digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def label(nbytes: int) -> str:
    """Returns ``64 KiB``, ``1 MiB`` or ``7 B``: exact, in the largest unit that divides the number."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


@cache
def _processor() -> str:
    try:
        model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        model = None
    return model[1] if model else platform.machine()
