"""Ranks on several hosts (network namespaces, gossamer.netlab): ranks find out who shares memory; results are right.

Every process claims that all ranks are on its host, as a bare `mpirun` or a container may do.
"""

import json
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions

import gossamer
from gossamer import comm as comms
from gossamer import netlab
from tests.backend.jobs import (
    DTYPES,
    FLOAT8,
    FLOATS,
    OPS,
    TESTED,
    backend_of,
    byte_view,
    named_ranks,
    noise,
    options,
    random_call,
    run_group,
    values,
)
from tests.support.on_hosts import partition_of, printed, run_ranks

FLOATING = [dtype for dtype in (*FLOATS, *FLOAT8) if dtype in DTYPES]
COUNTS = [1, 2, 257, 65_537, 300_001]
unavailable = netlab.missing()
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(unavailable), reason=unavailable or "available"),
]


def bits(tensors: list[torch.Tensor]) -> list[list[int]]:
    """A checksum of each tensor, which depends on the places of its bytes."""
    sums = []
    for tensor in tensors:
        flat = byte_view(tensor).flatten().long()
        sums.append([int((flat * (torch.arange(len(flat)) % 8191 + 1)).sum()), len(flat)])
    return sums


def host_job() -> None:
    """One rank: prints its findings as lines of JSON."""
    dist.init_process_group(TESTED, timeout=timedelta(seconds=40))
    group = dist.group.WORLD
    rank, size = group.rank(), group.size()
    sums = []
    for dtype in FLOATING:
        for count in COUNTS:
            for name in ("SUM", "AVG", "MAX"):
                sums.append(noise(count + rank, (count,), dtype))
                group.allreduce([sums[-1]], options(AllreduceOptions, reduceOp=getattr(OPS, name))).wait()
    exact = values(rank, (400_003,), torch.int64)
    group.allreduce([exact]).wait()
    assert torch.equal(exact, sum(values(r, (400_003,), torch.int64) for r in range(size)))
    for root in range(size):
        rooted = values(rank, (70_001,))
        group.reduce([rooted], options(ReduceOptions, rootRank=root)).wait()
        assert rank != root or torch.equal(rooted, sum(values(r, (70_001,)) for r in range(size)))
    calls = [random_call(group, key, largest=70_000) for key in range(80)]
    for works, check in calls:
        for work in works:
            work.wait()
        check()
    disagreements = []
    for _ in range(2 if TESTED != "gloo" else 0):
        with pytest.raises(gossamer.ConfigError, match="31.*47|47.*31") as caught:
            group.allreduce([torch.ones(31 if rank == size - 1 else 47)]).wait()
        disagreements.append(str(caught.value))
        # The last sends more than is expected.
        rows = [rank + 1 if rank == size - 1 else 1 for _ in range(size)]
        with pytest.raises(gossamer.ConfigError, match="all_to_all: rank [0-9]+ sends [0-9]+ bytes"):
            group.alltoall_base(torch.zeros(size), torch.ones(sum(rows)), [1] * size, rows).wait()
    levels = comms.hierarchy(comms.from_group(None))
    coded = noise(rank, (100_003,), torch.float32)
    exact_mean = sum(noise(r, (100_003,), torch.float32).double() for r in range(size)) / size
    gossamer.all_reduce(coded, op="mean", codec=gossamer.Int8(), group=levels)
    assert (coded - exact_mean).norm() < 0.02 * exact_mean.norm()
    sums.append(coded)
    last = torch.ones(3)
    group.allreduce([last]).wait()
    found = {
        "rank": rank,
        "hosts": getattr(backend_of(group), "hosts", None),
        "levels": levels.hosts,
        "bits": bits(sums),
        "disagreements": disagreements,
        "last": last.tolist(),
    }
    print(json.dumps(found), flush=True)
    if TESTED != "gloo":
        print(json.dumps(lose_the_last(group)), flush=True)
    os._exit(0)


def lose_the_last(group: dist.ProcessGroup) -> dict:
    """The last rank kills itself; the others go on calling."""
    if group.rank() == group.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        while True:
            group.allreduce([torch.ones(50_000)]).wait()
    except gossamer.CommError as error:
        found = {"lost": str(error), "lost_s": time.monotonic() - begun}
    time.sleep(1)  # rank 0 hosts the store; others may still read the reason there
    return found


def check_hosts(ranks_of: list[int], *, container: bool = False) -> None:
    size = sum(ranks_of)
    partition = partition_of(ranks_of)
    job = "from tests.backend import test_hosts; test_hosts.host_job()"
    with netlab.Hosts(len(ranks_of)) as hosts:
        ends = run_ranks(hosts, ranks_of, job, container=container)
    survivors = size if TESTED == "gloo" else size - 1
    for code, out, err in ends[:survivors]:
        assert code == 0, out[-2000:] + err[-4000:]
    found = [printed(end) for end in ends]
    for one, (_, out, err) in zip(found, ends, strict=True):
        assert "last" in one, out[-2000:] + err[-4000:]
    for rank, one in enumerate(found):
        assert one["rank"] == rank
        assert one["last"] == [size] * 3
        assert one["bits"] == found[0]["bits"], f"rank {rank} holds other bits than rank 0"
        assert one["levels"] == partition
    if TESTED == "gloo":
        return
    for one in found:
        assert one["hosts"] == partition
        assert len(one["disagreements"]) == 2
    for one in found[:-1]:
        assert size - 1 in named_ranks(one["lost"]), one["lost"]
        assert one["lost_s"] < 10


@pytest.mark.parametrize("ranks_of", [[2, 2], [1, 3], [1, 1, 1]], ids=["2+2", "1+3", "1+1+1"])
def test_the_hosts_are_found_and_everything_is_right_across_them(ranks_of):
    check_hosts(ranks_of)


def test_ranks_in_containers_of_their_own_share_memory_if_they_share_a_network():
    refused = netlab.no_containers()
    if refused:
        pytest.skip(refused)
    check_hosts([2, 1], container=True)


@pytest.mark.skipif(TESTED == "gloo", reason="Gloo knows no hosts")
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_of_one_host_are_one_host(size):
    assert run_group(size, lambda group: backend_of(group).hosts) == [[list(range(size))]] * size
