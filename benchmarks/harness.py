"""What the benchmarks share: the JSON line of a result with its target, and ranks as threads or processes.

No benchmark is here, and timing in turns is gossamer.bench.measuring's. Every bench_*.py calls `arguments` once and
`report` per result; run_all.py reads them.
"""

import argparse
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gossamer as gs
from gossamer import comm as gossamer_comm
from gossamer.bench import measuring
from gossamer.bench.measuring import as_one, copy_of, interleaved, paired, slowest, spread  # noqa: F401, for all
from gossamer.netlab import Hosts, run_on_hosts

FOLDER = Path(__file__).resolve().parent
ROWS = 8  # of text per rank and step, as in the demo
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


def rows_of(quick: bool) -> int:
    """The rows of text that a rank trains on in a step: a quick run needs no more than one."""
    return 1 if quick else ROWS


def report(what: str, value: float, unit: str, **fields: Any) -> None:
    """Print one result as a JSON line. The fields are those of gossamer.bench.measuring.result."""
    benchmark = Path(sys.argv[0]).stem.removeprefix("bench_")
    line = measuring.result(what, value, unit=unit, benchmark=benchmark, **fields)
    measuring.emit(line | _run() | measuring.place("cuda" if "--gpu" in sys.argv else "cpu"))


def report_against(
    what: str,
    samples: Sequence[float],
    unit: str,
    peer: tuple[str, Sequence[float]],
    ratios: Sequence[float],
    *,
    quartiles: bool = False,
    **fields: Any,
) -> None:
    """Print a result beside that of a peer which took turns with it: medians, and the median ratio, which is judged.

    `peer` is a name and samples, `ratios` are those of the turns. With `quartiles` the line has theirs too.
    """
    name, others = peer
    if quartiles:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        fields["ratio_quartiles"] = [round(low, 4), round(high, 4)]
    baseline, ratio = (name, statistics.median(others)), statistics.median(ratios)
    fields |= {"baseline": baseline, "ratio": ratio, "target_of": "ratio", "samples": samples}
    report(what, statistics.median(samples), unit, **fields)


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
    return _answer_in(out)


def run_hosts(size: int, job: dict[str, Any], *, rate: str, delays: Mapping[int, float] | None = None) -> Any:
    """As run_processes(size, job), each rank on a host of its own, as Hosts(size, rate, delays). Needs root."""
    command = [sys.executable, sys.argv[0], "--worker", json.dumps(job)]
    with Hosts(size, rate=rate, delays=delays) as hosts:
        outputs = run_on_hosts(command, hosts, threads=1, timeout_s=WORKER_TIMEOUT_S)
    return _answer_in(outputs[0].stdout)


def _answer_in(text: str) -> Any:
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def serve(options: argparse.Namespace, work: Callable[..., dict[str, Any]]) -> bool:
    """Does the job of a rank, if this process is one: joins the others and answers with work(**job). Says whether."""
    torch.set_num_threads(1)
    if not options.worker:
        return False
    gs.init(backend="gloo")
    answer(work(**json.loads(options.worker)))
    return True


def answer(result: dict[str, Any]) -> None:
    """Ends a worker: sends rank 0's result to the process that started it."""
    if gs.rank() == 0:
        print(json.dumps(result), flush=True)
    gc.collect()  # a wrapper in a reference cycle would keep the group's threads alive into interpreter exit
    gs.shutdown()


@cache
def _run() -> dict[str, Any]:
    """How this benchmark was started, and from which source."""
    git = ["git", "--no-optional-locks", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except OSError:
        commit = None
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {"command": shlex.join(command), "commit": commit}
