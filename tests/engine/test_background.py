"""The worker thread under algorithms: errors, and wrappers that are dropped while it works."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import gossamer as gs
from gossamer import _C
from tests import ROOT
from tests.support.models import batches, mlp, seeded
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap


def test_a_task_may_let_go_of_its_executor_and_a_failed_one_blocks_nobody():
    executor = _C.Executor(torch.device("cpu"))
    held = [executor]

    def last(held=held):
        time.sleep(0.05)
        held.clear()

    executor.submit(last)
    del executor, last
    held.clear()
    gc.collect()
    time.sleep(0.2)

    executor = _C.Executor(torch.device("cpu"))

    def fail():
        raise gs.CommError("lost")

    executor.submit(fail)
    for _ in range(200):
        executor.submit(lambda: None)
        executor.busy()
    with pytest.raises(gs.CommError, match="lost"):
        executor.wait()
    done = []
    executor.submit(lambda: done.append(1))
    executor.wait()
    assert done == [1]
    executor.stop()


def test_a_wait_for_one_task_does_not_wait_for_those_after_it():
    executor = _C.Executor(torch.device("cpu"))
    go, done = threading.Event(), []
    first = executor.submit(lambda: done.append(1))
    second = executor.submit(lambda: done.append(2))
    executor.submit(go.wait)
    executor.wait(first)
    executor.wait(second)
    assert done == [1, 2]
    assert executor.busy()
    go.set()
    executor.wait()
    assert not executor.busy()

    def fail():
        raise gs.CommError("lost")

    executor.submit(fail)
    last = executor.submit(lambda: done.append(3))
    executor.submit(lambda: done.append(4))
    with pytest.raises(gs.CommError, match="lost"):
        executor.wait(last)
    executor.wait()
    assert done == [1, 2], "what comes after an error is dropped"
    executor.stop()


def test_a_wrapper_that_is_dropped_while_a_mean_is_under_way_ends_quietly():
    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(2, delay=1))
        for batch in batches(2):
            step(model, optimizer, batch)
        del model, optimizer
        gc.collect()
        time.sleep(0.1)

    run_ranks(2, body)


def test_an_asynchronous_wrapper_that_is_dropped_while_its_round_waits_ends_without_the_others():
    def body(comm):
        model, optimizer = wrap(comm, gs.AsyncModelAverage(sync_interval_ms=0))
        if comm.rank == 0:
            step(model, optimizer, batches(1)[0])  # begins a round that rank 1 never joins
        begun = time.monotonic()
        del model, optimizer
        gc.collect()
        return time.monotonic() - begun

    assert max(run_ranks(2, body)) < 10


AT_EXIT = """
import atexit, gc, os, sys, threading
from pathlib import Path

@atexit.register  # the first one is called last
def threads():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    os.write(1, f"{names.count('gossamer')} of ours".encode())

import gossamer as gs
from tests.support.models import batches, mlp, seeded
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap

def body(comm):
    model, optimizer = wrap(comm, gs.AsyncModelAverage(sync_interval_ms=0))
    if comm.rank == 0:
        step(model, optimizer, batches(1)[0])
    del model, optimizer
    gc.collect()

run_ranks(2, body)
"""


def test_no_thread_of_a_dropped_wrapper_is_left_when_the_interpreter_ends():
    """A thread that asked for the GIL then would abort the process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 of ours"


LEVELS = {
    "by one host": [[0, 1, 2, 3]],
    "by two hosts": [[0, 1], [2, 3]],
    "by unequal hosts": [[0], [1, 2, 3]],
}


@pytest.mark.parametrize(
    "name",
    ["gradient_allreduce", "decentralized", "async"]
    + [f"{name} {hosts}" for name in ("bytegrad", "gradient_allreduce") for hosts in LEVELS],
)
def test_those_who_wait_for_a_rank_that_has_closed_after_a_crash_learn_of_it_at_once(name, backend):
    """Their connections end at once as well, although operations after the failed one are still under way."""

    def body(comm):
        module = seeded(mlp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        algorithm = gs.AsyncModelAverage(0) if name == "async" else name.split()[0]
        hosts = LEVELS.get(name.partition(" ")[2])
        group = gs.Hierarchical(comm, hosts) if hosts else comm
        model = gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=group)
        step(model, optimizer, batches(1)[0])
        if comm.rank == 1:
            model.engine.close(crashed=True)
            return 0.0
        began = time.monotonic()
        with pytest.raises(gs.CommError):  # noqa: PT012  (async notices it in a later step)
            while time.monotonic() < began + 20:
                step(model, optimizer, batches(1)[0])
        took = time.monotonic() - began
        model.engine.close(crashed=True)
        return took

    began = time.monotonic()
    assert max(run_ranks(4, body)) < 5
    assert time.monotonic() - began < 15
