"""The engine on the backend "gossamer": buckets lie in memory that all ranks map, and hold nothing once freed."""

import gc

import pytest
import torch

import gossamer as gs
from tests.support import ranks
from tests.support.models import batches, mlp, seeded, shard


def shared_mappings() -> list[range]:
    """Addresses of this process that are mapped from the backend's anonymous memory."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file if "memfd:gossamer" in line]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


@pytest.fixture(autouse=True)
def _gossamer():
    ranks.choose_backend("gossamer")
    yield
    ranks.choose_backend("gloo")


@pytest.mark.parametrize("size", [2, 3])
def test_buckets_lie_in_memory_that_all_ranks_map(size):
    def body(comm):
        wrapped = gs.DataParallel(seeded(mlp), process_group=comm, bucket_bytes=1000)
        wrapped(shard(batches(1)[0], comm)).square().sum().backward()
        mapped = shared_mappings()
        flats = [bucket.flat("grad") for bucket in wrapped.engine.buckets]
        return [any(flat.data_ptr() in addresses for addresses in mapped) for flat in flats]

    for found in ranks.run_ranks(size, body):
        assert found
        assert all(found)


def test_freed_buckets_leave_no_mapping():
    def body(comm):
        before = len(shared_mappings())
        ranks_memory = [comm.allocate(100_000) for _ in range(5)]
        during = len(shared_mappings())
        del ranks_memory
        gc.collect()
        return before, during

    results = ranks.run_ranks(2, body)
    after = len(shared_mappings())
    assert all(during >= before + 5 for before, during in results)
    assert after <= min(before for before, _ in results) + 2  # the group of this test lives on


def test_a_sum_of_allocated_memory_has_the_bits_of_a_sum_of_plain_memory():
    def body(comm):
        source = torch.randn(50_001, generator=torch.Generator().manual_seed(comm.rank))
        plain = source.clone()
        shared = comm.allocate(plain.nbytes).view(torch.float32)
        shared.copy_(source)
        comm.all_reduce(plain).wait()
        comm.all_reduce(shared).wait()
        part = shared[7:30_000]
        part.copy_(source[7:30_000])
        comm.all_reduce(part).wait()
        return plain, shared.clone()

    results = ranks.run_ranks(3, body)
    for plain, shared in results:
        assert torch.equal(plain, results[0][0])
        assert torch.equal(shared, plain)
