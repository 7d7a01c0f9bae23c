"""Ranks as threads (one backend a thread around a shared HashStore, no default group), and as processes.

`run_ranks(n, body)` calls body(comm) once per rank at the same time and returns the results in rank order;
with groups=2, body(comm, other) of the same ranks.
The first exception of any rank is raised, unless `errors=True` asks for them as results.
"""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from gossamer import _C
from gossamer import comm as gossamer_comm
from gossamer.comm import hierarchical
from tests import ROOT

TIMEOUT_S = 30

# The backend of run_ranks' groups; the fixture `backend` of tests/conftest.py sets it for a test.
BACKENDS = ("gloo", "gossamer")
_chosen = "gloo"

_backends: list[Any] = []
_threads_left = 0  # after the last collection of garbage


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *,
    groups: int = 1,
    errors: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list:
    store = dist.HashStore()
    kept: list[Any] = []  # until all ranks are done: an early end would look like a loss

    def rank_body(rank: int) -> Any:
        comms = []
        for group in range(groups):
            name = f"group{group}"
            own = dist.PrefixStore(name, store)
            backend = make_backend(own, rank, size, timeout_s)
            comms.append(gossamer_comm.from_backend(backend, store=store, name=name))
            del (
                backend
            )  # the communicator ends it, without the GIL; the idle threads of hundreds would slow the tests
        kept.extend(comms)
        return body(*comms)

    try:
        return run_threads(size, rank_body, errors=errors, timeout_s=timeout_s + 20)
    finally:
        # A setting of the whole process: torch's DDP restores it in each forward, which goes wrong with threads.
        nn.parallel.DistributedDataParallel._active_ddp_module = None


def choose_backend(name: str) -> None:
    global _chosen
    _chosen = name


def make_backend(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    kind = _C.GossamerBackend if _chosen == "gossamer" else dist.ProcessGroupGloo
    return kind(store, rank, size, timedelta(seconds=timeout_s))


def run_threads(
    size: int, rank_body: Callable[[int], Any], *, errors: bool = False, timeout_s: float = 60
) -> list:
    """rank_body(rank) for every rank at the same time; results, or with errors=True exceptions, in rank order."""
    results: list[Any] = [None] * size
    failures: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = rank_body(rank)
        except BaseException as error:
            failures[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if errors:
        return [
            failure if failure is not None else result
            for failure, result in zip(failures, results, strict=True)
        ]
    for failure in failures:
        if failure is not None:
            raise failure
    return results


def keep_alive(backends: list[Any]) -> None:
    """Keeps them until the test ends: one of their own threads must not drop the last reference."""
    _backends.extend(backends)


def let_go() -> None:
    """Ends the groups of a test: the idle threads of hundreds of them wake often enough to take a whole core."""
    global _threads_left
    _backends.clear()
    hierarchical._by_hosts.clear()  # what direct calls have made of the communicator of a test, which they keep
    if threads() > _threads_left + 30:  # those of groups in frames of errors, and in other cycles
        gc.collect()
        _threads_left = threads()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def say(*words: object) -> None:
    """Prints a line, in a script of run_job(), as one write, so that lines of several processes do not mix.

    print() makes several: torchrun starts its processes without buffers.
    """
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def run_job(script: str, size: int, folder: Path, *arguments: str) -> str:
    """Runs the text of a script, which may import tests, in `size` processes under torchrun; its standard output.

    Fails if one fails.
    """
    file = folder / "job.py"
    file.write_text(script)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    done = subprocess.run(
        [sys.executable, *launcher, str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
