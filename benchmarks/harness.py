"""What the benchmarks share: the JSON line of a result, timing in turns, and ranks as threads or processes.

No benchmark is here. Every bench_*.py calls `arguments` once and `report` per result; run_all.py reads them.
"""

import argparse
import gc
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gossamer as gs
from gossamer import comm as gossamer_comm

FOLDER = Path(__file__).resolve().parent
WORKER_TIMEOUT_S = 240
_backends: list[Any] = []  # a Gloo backend's end joins threads that may want the GIL: they live as long as we


def arguments(description: str, **flags: str | tuple[str, str]) -> argparse.Namespace:
    """--quick, and each of `flags`: (name: help) a switch, (name: (default, help)) an option with a value."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="only a check; figures mean little")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # this process is a rank: its job in JSON
    for name, text in flags.items():
        if isinstance(text, str):
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{name}", default=text[0], help=f"{text[1]} (%(default)s)")
    return parser.parse_args()


def report(
    what: str,
    value: float,
    unit: str,
    *,
    baseline: tuple[str, float] | None = None,
    ratio: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    target_of: str = "value",
    samples: Sequence[float] = (),
    **more: Any,
) -> None:
    """Print one result as a JSON line.

    Args:
        value: the figure; a median where `samples`, in the same unit, are given.
        baseline: name and value of the peer, measured in the same run.
        ratio: value / baseline where None; for timings the median of the ratios of each turn is better.
        at_least, at_most: the target; `met` tells. None is no target: the figure is there to compare.
        target_of: "value" or "ratio": what the target is about.
    """
    name, peer = baseline if baseline else (None, None)
    if ratio is None and peer:
        ratio = value / peer
    judged = value if target_of == "value" else ratio
    met = None
    if at_least is not None:
        met = judged >= at_least
    elif at_most is not None:
        met = judged <= at_most
    line = {"benchmark": Path(sys.argv[0]).stem.removeprefix("bench_"), "what": what}
    line |= {"value": _short(value), "unit": unit, "baseline": name, "baseline_value": _short(peer)}
    line |= {"ratio": _short(ratio), "at_least": at_least, "at_most": at_most}
    line |= {"target_of": target_of, "met": met}
    if samples:
        line |= {"median": _short(statistics.median(samples)), "spread": _short(spread(samples))}
        line |= {"samples": len(samples)}
    print(json.dumps(line | more | _place()), flush=True)


def spread(samples: Sequence[float]) -> float:
    """The distance between the quartiles; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


@dataclass
class Turns:
    """One body's figures, a turn each: the median time of a call, and its mean processor time on all threads."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def interleaved(
    bodies: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeats: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Turns]:
    """Times the bodies in turns, so that whatever else the machine does falls on all alike.

    A turn calls one body `repeats` times after an untimed call; the order moves on by one every round.

    Args:
        before: called ahead of each turn, such as a barrier between ranks.
    """
    names = list(bodies)
    turns = {name: Turns() for name in names}
    for body in bodies.values():
        body()
        body()
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before()
            bodies[name]()
            calls, cpu_start_s = [], time.process_time()
            for _ in range(repeats):
                start_s = time.perf_counter()
                bodies[name]()
                calls.append(time.perf_counter() - start_s)
            turns[name].seconds.append(statistics.median(calls))
            turns[name].cpu_seconds.append((time.process_time() - cpu_start_s) / repeats)
    return turns


def copy_of(moved: int, device: str) -> Callable[[], object]:
    """A copy that moves `moved` bytes, read and written together: the roofline of whatever moves as many."""
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    out = torch.empty_like(source)
    return lambda: out.copy_(source)


def as_one(body: Callable[[], object], calls: int, device: str) -> Callable[[], object]:
    """`calls` calls of body, waited for. On a GPU one CUDA graph: what launching costs the host is left out."""
    if device == "cpu":

        def run() -> None:
            for _ in range(calls):
                body()

        return run

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # a graph begins with everything loaded and allocated
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


def paired(seconds: Sequence[float], of: Sequence[float]) -> list[float]:
    """The ratio of each round; its median is steadier than the ratio of medians on a busy machine."""
    return [mine / other for mine, other in zip(seconds, of, strict=True)]


def slowest(turns: Mapping[str, Turns]) -> dict[str, list[float]]:
    """The seconds of each turn on the rank that took longest; a collective of the default group."""
    mine = {name: each.seconds for name, each in turns.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {name: [max(each) for each in zip(*(of[name] for of in ranks), strict=True)] for name in mine}


def run_threads(size: int, body: Callable[[Any, Any], Any]) -> list[Any]:
    """body(communicator, Gloo backend) once per rank, each on a thread of its own; results in rank order."""
    store = dist.HashStore()
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
            _backends.append(backend)
            comm = gossamer_comm.from_backend(backend, store=store, name="benchmark")
            results[rank] = body(comm, backend)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WORKER_TIMEOUT_S)
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"ranks as threads: none may take more than {WORKER_TIMEOUT_S} s, but one hangs")
    return results


def run_processes(size: int, job: dict[str, Any]) -> Any:
    """Starts this benchmark as `size` fresh processes with --worker, and returns what rank 0 gave `answer`.

    One thread each, through torch.distributed.run, so gs.init() and stock torch find their place.
    """
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {size}".split()
    command = [sys.executable, *launcher, sys.argv[0], "--worker", json.dumps(job)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            out, errors = process.communicate(timeout=WORKER_TIMEOUT_S)
        except BaseException:  # a timeout or Ctrl-C: the launcher, asked so, ends the workers
            process.terminate()
            raise
    if process.returncode != 0:
        raise RuntimeError(f"a worker of {size} failed:\n{errors[-4000:]}")
    answers = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(answers[-1])


def answer(result: dict[str, Any]) -> None:
    """The end of a worker: rank 0's result goes to the process that started it."""
    if gs.rank() == 0:
        print(json.dumps(result), flush=True)
    gc.collect()  # a wrapper in a reference cycle would keep the group's threads alive into interpreter exit
    gs.shutdown()


def _short(value: float | None) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


@cache
def _machine() -> dict[str, Any]:
    git = ["git", "--no-optional-locks", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except OSError:
        commit = None
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = model[1] if model else platform.machine()
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    device = {"device": torch.cuda.get_device_name()} if "--gpu" in sys.argv else {}
    return device | {
        "command": shlex.join(command),
        "torch": torch.__version__,
        "commit": commit,
        "machine": f"{processor}, {os.cpu_count()} cores",
    }


def _place() -> dict[str, Any]:
    load = round(os.getloadavg()[0], 1)  # of this machine in the last minute: judge timings by it
    return _machine() | {"instruction_set": gs._C.instruction_set(), "load": load}
