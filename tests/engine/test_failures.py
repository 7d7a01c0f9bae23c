"""A worker dies in the middle of backward: the others raise CommError soon, and name it. Real processes."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from tests.support.forks import Script, until_all_end
from tests.support.ranks import run_ranks

WORKER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
import gossamer as gs

rank, size, victim, algorithm = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
port, host = int(sys.argv[5]), int(sys.argv[6])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == host, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

class Die(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        ctx.step = step
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if rank == victim and ctx.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return grad, None

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x, step):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 3:
                x = Die.apply(x, step)
        return x

algorithm, _, levels = algorithm.partition(" ")
group = gs.Hierarchical(hosts=[[0, 1], [2, 3]]) if levels else None
algorithm = gs.GradientAllReduce(deterministic=True) if algorithm == "deterministic" else algorithm
model = gs.DataParallel(
    Model(), algorithm=algorithm, process_group=group, bucket_bytes=20000, first_bucket_bytes=20000
)
try:
    for step in range(4):
        model(torch.randn(8, 64), step).sum().backward()
    print("no error")
except gs.CommError as error:
    print(f"CommError: {error}", flush=True)
    os._exit(3)
"""


LAUNCHER = -1  # hosts the store, instead of a rank


def serve_store() -> dist.TCPStore:
    """Hosts the store outside the workers, as a launcher's agent does, so that it outlives rank 0."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


def start_worker(script: Path, *arguments: object) -> Script:
    return Script([script, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}, script.parent)


def printed_line(worker: Script, limit_s: float = 60) -> str:
    """The first line that the worker prints. Waits for it."""
    until = time.monotonic() + limit_s
    while "\n" not in worker.printed()[0]:
        assert time.monotonic() < until, worker.printed()
        time.sleep(0.02)
    return worker.printed()[0].splitlines()[0]


def survivors_of(victim: int, workers: list[Script]) -> tuple[dict[int, str], float]:
    """Waits for all. Returns what each survivor printed, and the seconds that they took after the victim had died."""
    try:
        workers[victim].process.join(120)
        died = time.monotonic()
        codes = until_all_end(workers, limit_s=120, grace_s=120)
        took_s = time.monotonic() - died
        outputs = {rank: "".join(worker.printed()) for rank, worker in enumerate(workers)}
    finally:
        for worker in workers:
            worker.end()
    assert codes == [-signal.SIGKILL if rank == victim else 3 for rank in range(len(workers))], outputs
    del outputs[victim]
    return outputs, took_s


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "deterministic"])
@pytest.mark.parametrize(
    ("size", "victim", "host"), [(2, 1, LAUNCHER), (4, 2, LAUNCHER), (4, 0, 0)], ids=["2", "4", "store too"]
)
def test_survivors_of_a_killed_worker_raise_soon_and_name_it(
    algorithm, size, victim, host, tmp_path, free_port
):
    """Even if the store dies with rank 0, which hosts it."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    store = serve_store() if host == LAUNCHER else None
    port = store.port if store else free_port
    workers = [start_worker(script, rank, size, victim, algorithm, port, host) for rank in range(size)]
    outputs, took_s = survivors_of(victim, workers)
    for rank, output in outputs.items():
        assert f"rank {rank}/{size} step 2 bucket" in output
        assert f"lost its connection to rank {victim}" in output, output
    assert took_s < 60  # the group's timeout is 30 minutes


@pytest.mark.parametrize("algorithm", ["gradient_allreduce by hosts", "bytegrad by hosts"])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_worker_is_named_on_both_levels(algorithm, victim, tmp_path):
    """Even by the rank that neither shares a host with it nor carries the same part."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    store = serve_store()
    workers = [start_worker(script, rank, 4, victim, algorithm, store.port, LAUNCHER) for rank in range(4)]
    outputs, took_s = survivors_of(victim, workers)
    for rank, output in outputs.items():
        assert f"rank {rank}/4 step 2 bucket" in output
        assert f"lost its connection to rank {victim}" in output or f"rank {victim} has ended" in output, (
            output
        )
    assert took_s < 10


WAITING = """
import sys, time
import torch
import torch.distributed as dist
import gossamer as gs

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False),
                        rank=rank, world_size=2)
model = gs.DataParallel(torch.nn.Linear(4, 4))
try:
    if rank == 0:
        print("waiting", flush=True)
        model(torch.ones(1, 4)).sum().backward()
    else:
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_rank_that_waits_for_another(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WAITING)
    store = serve_store()
    workers = [start_worker(script, rank, store.port) for rank in range(2)]
    try:
        assert printed_line(workers[0]) == "waiting"
        time.sleep(0.5)
        os.kill(workers[0].process.pid, signal.SIGINT)
        begin = time.monotonic()
        code, output, errors = workers[0].finish(120)
        assert output.startswith("waiting\ninterrupted"), output + errors
        assert time.monotonic() - begin < 60
        assert code == 0, errors
    finally:
        for worker in workers:
            worker.end()


def test_a_rank_that_is_late_over_gloo_is_named_by_those_who_time_out():
    """Gloo closes their own connections then; these are not to blame."""
    ended = threading.Barrier(3)

    def body(comm):
        try:
            if comm.rank < 2:
                comm.all_reduce(torch.ones(3)).wait()
        finally:
            ended.wait(60)

    first, second, late = run_ranks(3, body, errors=True, timeout_s=2)
    for error in (first, second):
        assert isinstance(error, gs.CommError)
        assert "silent: rank 2" in str(error), error
    assert late is None
