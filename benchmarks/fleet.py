"""Processes that take turns with other processes: ranks of one contender, asleep until told to measure.

bench_allreduce.py starts some under torchrun and some under mpirun. The parent gives orders over a socket for each
rank: a rank that waited for its turn in a collective would spin on a core on which others are timed.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import WORKER_TIMEOUT_S

Turn = Callable[..., list[float]]


def batches_of(call: Callable[[], object], barrier: Callable[[], object], order: dict) -> list[float]:
    """Seconds a call, a figure for each batch."""
    seconds = []
    call()
    for _ in range(order["batches"]):
        barrier()
        start_s = time.perf_counter()
        for _ in range(order["calls"]):
            call()
        seconds.append((time.perf_counter() - start_s) / order["calls"])
    barrier()
    return seconds


def serve(job: dict, rank: int, prepare: Callable[[str, int], Callable], barrier: Callable) -> None:
    """Takes turns as the parent orders them, until it hangs up."""
    prepared: dict[tuple[str, int], Callable[[], object]] = {}
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(job["address"])
        with link.makefile("rw") as stream:
            print(rank, file=stream, flush=True)
            for line in stream:
                order = json.loads(line)
                key = order["contender"], order["nbytes"]
                if key not in prepared:
                    prepared[key] = prepare(*key)
                print(json.dumps(batches_of(prepared[key], barrier, order)), file=stream, flush=True)


@contextmanager
def started(launcher: list[str], size: int, job: dict, folder: Path) -> Iterator[Turn]:
    """Starts `size` ranks of this benchmark as `job` says; gives the function that lets them take a turn."""
    address, log = str(folder / f"{job['as']}{size}"), folder / f"{job['as']}{size}.log"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPI4PY_MPIABI": "openmpi"}
    command = [*launcher, sys.argv[0], "--worker", json.dumps(job | {"address": address})]
    streams: list[Any] = []

    def lost(what: str) -> RuntimeError:
        return RuntimeError(f"a rank of {job['as']} {what}:\n{log.read_text()[-4000:]}")

    def turn(contender: str, nbytes: int, *, batches: int, calls: int) -> list[float]:
        order = {"contender": contender, "nbytes": nbytes, "batches": batches, "calls": calls}
        for stream in streams:
            print(json.dumps(order), file=stream, flush=True)
        replies = [stream.readline() for stream in streams]
        if not all(replies):
            raise lost(f"failed at {contender}, {nbytes} bytes")
        return [max(of_ranks) for of_ranks in zip(*map(json.loads, replies), strict=True)]

    with ExitStack() as stack, socket.socket(socket.AF_UNIX) as door, log.open("w") as output:
        door.bind(address)
        door.listen(size)
        door.settimeout(0.2)
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, env=environment, **files)
        stack.callback(stopped, process)
        deadline_s = time.monotonic() + WORKER_TIMEOUT_S
        while len(streams) < size:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise lost("did not come")
            with suppress(TimeoutError):
                link = stack.enter_context(door.accept()[0])
                link.settimeout(WORKER_TIMEOUT_S)
                streams.append(stack.enter_context(link.makefile("rw")))
        for stream in streams:
            stream.readline()
        yield turn


def stopped(process: "subprocess.Popen[bytes]") -> None:
    """Ends the processes. Called after the streams are closed: ranks then end by themselves, and so do launchers."""
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its ranks
        process.wait()
