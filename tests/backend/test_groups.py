"""Names and groups: every spelling of init_process_group, new groups, splits, ends and beginnings, symmetric memory.

The tests run in the ranks of a job (tests/support/jobs.py).
"""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

import gossamer
from tests.backend.jobs import CPU, TESTED, join, noise, values
from tests.support.jobs import Job

SPELLINGS = [TESTED, f"cpu:{TESTED}", TESTED.upper()]

pytestmark = pytest.mark.usefixtures("job", "default_group")


@pytest.fixture(scope="module", params=[2, 3])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with Job(request.param) as job:
        yield job


@pytest.fixture(scope="module", params=SPELLINGS)
def default_group(job: Job, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each time from the beginning, over the same store."""
    with job.within(join, dist.destroy_process_group, backend=request.param):
        yield


def total(group: dist.ProcessGroup | None = None) -> int:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def test_the_default_group_is_of_the_backend() -> None:
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.name() == TESTED
    assert TESTED in dist.get_backend()
    if TESTED == "gossamer":
        assert isinstance(backend, gossamer._C.GossamerBackend)
        assert backend.hosts == [list(range(dist.get_world_size()))]


def test_new_groups_of_some_ranks_and_of_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([size - 1, 0], backend=TESTED)
    if rank in (0, size - 1):
        assert total(group) == len({0, size - 1})
    mine, every = dist.new_subgroups(group_size=1)
    assert total(mine) == 1
    assert len(every) == size
    mine, _ = dist.new_subgroups_by_enumeration(
        [[r for r in range(size) if r % 2 == part] for part in (0, 1)]
    )
    assert total(mine) == len(range(rank % 2, size, 2))
    dist.destroy_process_group(mine)
    assert total() == size


def test_sparse_sums_whose_ranks_meet_again_over_the_same_store() -> None:
    """Gloo carries them, and would find the addresses of earlier groups."""
    size = dist.get_world_size()
    tensor = torch.eye(4).to_sparse()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), size * torch.eye(4))


def test_groups_split_from_their_parent_again_and_again() -> None:
    rank, size, parent = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert parent._get_backend(CPU).supports_splitting
    parts = [[0], list(range(1, size))]
    mine = parts[min(rank, 1)]
    for attempt in range(3):
        child = parent.split_group(mine, timeout=timedelta(seconds=20), group_name=f"part{attempt}")
        tensor = torch.ones(1)
        child.allreduce([tensor]).wait()
        assert (child.size(), child.rank(), tensor.item()) == (len(mine), mine.index(rank), len(mine))
    everyone = parent.split_group(list(range(size)), timeout=timedelta(seconds=20), group_name="everyone")
    tensor = noise(rank, (1000,))
    again = tensor.clone()
    everyone.allreduce([tensor]).wait()
    parent.allreduce([again]).wait()
    assert torch.equal(tensor, again)


def test_a_rank_outside_a_split_gets_no_group() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    child = dist.group.WORLD.split_group([size - 1], timeout=timedelta(seconds=20), group_name="last")
    assert (child is None) == (rank != size - 1)
    assert total() == size


def test_a_monitored_barrier_of_the_group_itself_passes() -> None:
    """dist.monitored_barrier refuses every backend but Gloo by name; the group's own does not."""
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), True)


def test_a_mesh_of_two_dimensions_has_groups_along_both() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    for name, length in zip(("outer", "inner"), shape, strict=True):
        assert total(mesh.get_group(name)) == length
        if length < size:
            assert TESTED in dist.get_backend(mesh.get_group(name))


def test_symmetric_memory_is_read_in_place_by_peers() -> None:
    if TESTED == "gloo":
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = symmetric.empty(1000, 3, dtype=torch.float32, device="cpu")
    handle = symmetric.rendezvous(tensor, dist.group.WORLD.group_name)
    assert (handle.rank, handle.world_size) == (rank, size)
    for round_number in range(20):
        tensor.copy_(values(100 * round_number + rank, (1000, 3)))
        handle.barrier()
        for peer in range(size):
            seen = handle.get_buffer(peer, (1000, 3), torch.float32)
            assert torch.equal(seen, values(100 * round_number + peer, (1000, 3)))
            offset = handle.get_buffer(peer, (4,), torch.float32, 30)
            assert torch.equal(offset, seen.flatten()[30:34])
        handle.barrier()
    peer = (rank + 1) % size
    handle.get_buffer(peer, (1000, 3), torch.float32)[7, 1] = 40.0 + rank  # a write into a peer's memory
    handle.barrier()
    assert tensor[7, 1] == 40.0 + (rank - 1) % size


def test_an_all_reduce_of_symmetric_memory_has_the_bits_of_any_other() -> None:
    if TESTED == "gloo":
        return
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        tensor = symmetric.empty(70_001, dtype=dtype, device="cpu")
        symmetric.rendezvous(tensor, dist.group.WORLD.group_name)
        for round_number in range(5):
            for part in (slice(None), slice(13, 20_000), slice(0, 1)):
                plain = noise(round_number + rank, (70_001,), dtype)
                tensor.copy_(plain)
                dist.all_reduce(plain[part])
                dist.all_reduce(tensor[part])
                assert torch.equal(tensor, plain)


def test_symmetric_memory_signals_go_from_rank_to_rank() -> None:
    if TESTED == "gloo" or dist.get_world_size() < 2:
        return
    rank = dist.get_rank()
    tensor = symmetric.empty(8, dtype=torch.float32, device="cpu")
    handle = symmetric.rendezvous(tensor, dist.group.WORLD.group_name)
    tensor.zero_()
    handle.barrier()
    for round_number in range(50):
        if rank == 0:
            handle.get_buffer(1, (8,), torch.float32).fill_(round_number)
            handle.put_signal(1, channel=2, timeout_ms=20_000)
            handle.wait_signal(1, channel=3, timeout_ms=20_000)
        elif rank == 1:
            handle.wait_signal(0, channel=2, timeout_ms=20_000)
            assert tensor.tolist() == [float(round_number)] * 8
            handle.put_signal(0, channel=3, timeout_ms=20_000)


def test_python_runs_while_ranks_wait_for_each_other_in_symmetric_memory() -> None:
    if TESTED == "gloo":
        return
    for _ in range(20):
        dist.all_reduce(torch.ones(200_000), async_op=True)  # the backend's thread frees it
        handle = symmetric.rendezvous(symmetric.empty(8, device="cpu"), dist.group.WORLD)
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    if dist.get_rank() == 0:
        time.sleep(0.5)
    handle.barrier()
    done.set()
    ticker.join()
    assert ticks >= 5, ticks
