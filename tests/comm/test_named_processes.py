# Named operations between processes, one of which is killed.

import re

import pytest

from gossamer.netlab import missing
from tests.support.forks import fork_job, fork_on_hosts

JOB = """
import os, signal, subprocess, sys, time
import torch
import torch.multiprocessing as mp

def work(rank, size, backend, victim, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import gossamer as gs
    from gossamer.comm import open_named
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", port, size, False)
    gs.runtime.join(store, rank=rank, size=size, local_size=size, backend=backend)
    named = open_named(None, range(size), key="all")
    def reduce(name, numel):
        (operation,) = named.submit("allreduce", [torch.ones(numel)], names=[name])
        operation.wait()
        return operation.output
    for step in range(3):
        assert reduce(f"warm{step}", 1000).eq(size).all()
    dist.barrier()
    if rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        for step in range(10**6):
            reduce(f"step{step % 5}", 1000)
        raise SystemExit("nothing was noticed")
    except gs.CommError as error:
        print(f"rank {rank} noticed in {time.monotonic() - begun:.1f} s: {error}", flush=True)
    try:
        reduce("later", 3)
        raise SystemExit("an operation began after the end")
    except gs.CommError:
        pass
    named.shutdown()
    os._exit(0)

if __name__ == "__main__":
    import torch.distributed as dist
    size, backend, victim = 3, sys.argv[1], int(sys.argv[2])
    server = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
    context = mp.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, size, backend, victim, server.port)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes[victim] == -signal.SIGKILL, codes
    assert [code for number, code in enumerate(codes) if number != victim] == [0] * (size - 1), codes
"""


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("kind", ["gossamer", "gloo"])
def test_all_ranks_learn_within_seconds_that_one_was_killed(kind, victim, tmp_path) -> None:
    output = fork_job(JOB, 1, tmp_path, kind, str(victim))
    noticed = re.findall(r"rank (\d) noticed in ([\d.]+) s", output)
    assert sorted(int(rank) for rank, _ in noticed) == sorted({0, 1, 2} - {victim}), output
    assert all(float(seconds) < 20 for _, seconds in noticed), output


ON_A_HOST = """
import os, signal, sys, time
import torch
import gossamer as gs
from gossamer.comm import open_named

gs.init(backend="gloo")
rank, size, victim = gs.rank(), gs.size(), int(sys.argv[1])
named = open_named(None, range(size), key="all")

def submitted(name):
    (operation,) = named.submit("allreduce", [torch.ones(1000)], names=[name])
    return operation

for step in range(3):
    submitted(f"warm{step}").wait()
if rank == victim:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
begun = time.monotonic()
try:
    submitted("not of all").wait()
except gs.CommError as error:
    print(f"rank {rank} noticed in {time.monotonic() - begun:.1f} s: {error}", flush=True)
named.shutdown()
os._exit(0)
"""


@pytest.mark.skipif(bool(missing()), reason=missing() or "available")
def test_rank_0_learns_of_a_rank_that_is_killed_on_another_host_while_nothing_is_transferred() -> None:
    outputs = fork_on_hosts(["-c", ON_A_HOST, 2], 3, killed=2)
    noticed = [re.search(r"noticed in ([\d.]+) s: negotiate: rank 2 ", out) for out, _ in outputs]
    assert [found is not None for found in noticed] == [True, True, False], outputs
    assert all(float(found[1]) < 20 for found in noticed if found), outputs
