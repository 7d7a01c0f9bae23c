"""Ranks that read each other's buckets in place, on the CPU: the bits of every other path, whatever the sizes.

The kernels of a GPU are in tests/gpu/test_equal_bytes.py; processes on one GPU in tests/gpu/test_symmetric.py.
"""

import copy
import gc

import pytest
import torch

import gossamer as gs
from gossamer import _C
from gossamer import comm as comms
from tests.support import ranks
from tests.support.codec_cases import CODECS, DTYPES
from tests.support.models import mlp, seeded, shards, trained
from tests.support.shared_memory import errors_have_the_same_bits, same_bits, sample, sums_have_the_same_bits

SIZES = [0, 1, 7, 8, 255, 256, 257, 1021, 4096, 10_007]


@pytest.fixture(autouse=True)
def _gossamer():
    ranks.choose_backend("gossamer")
    yield
    ranks.choose_backend("gloo")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_allocated_memory_are_those_of_the_deterministic_two_shot(size):
    def body(comm):
        own = comms.symmetric(comm, comm)
        same = []
        for dtype in DTYPES:
            memory = own.allocate(SIZES[-1] * dtype.itemsize).view(dtype)
            for numel in SIZES:
                for op in ("sum", "mean"):
                    x = memory[:numel].copy_(sample(comm.rank, numel, dtype))
                    plain = x.clone()
                    gs.all_reduce(x, op=op, deterministic=True, group=own)
                    gs.all_reduce(plain, op=op, deterministic=True, group=comm)
                    same.append(same_bits(x, plain))
                x.copy_(sample(comm.rank, numel, dtype))
                own.all_reduce(x).wait()
                plain = sample(comm.rank, numel, dtype)
                gs.all_reduce(plain, deterministic=True, group=comm)
                same.append(same_bits(x, plain))
        return same

    for same in ranks.run_ranks(size, body):
        assert len(same) == 3 * len(DTYPES) * len(SIZES)
        assert all(same)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_compressed_sums_are_those_of_the_two_shot_over_the_transport(codec, size):
    def body(comm):
        return sums_have_the_same_bits(comms.symmetric(comm, comm), comm, codec, SIZES)

    assert ranks.run_ranks(size, body) == [True] * size


def test_error_feedback_keeps_the_same_errors():
    def body(comm):
        return errors_have_the_same_bits(comms.symmetric(comm, comm), comm)

    assert ranks.run_ranks(3, body) == [True] * 3


def test_a_rank_that_is_late_gets_no_rows_of_a_later_call():
    """One rank sleeps before it reads; another writes the next call's rows as soon as it may."""

    def body(comm):
        own = comms.symmetric(comm, comm)
        same = []
        for call in range(200):
            if call % 3 == comm.rank:
                torch.randn(20_000).sort()
            x = torch.full((300 + 500 * (call % 2),), float(call + comm.rank))
            gs.all_reduce(x, codec=gs.BF16(), group=own)
            same.append(bool((x == 3 * call + 3).all()) or call > 80)  # exact in bfloat16 up to there
        return same

    for same in ranks.run_ranks(3, body):
        assert all(same)


def test_a_part_of_allocated_memory_is_summed_and_the_rest_left_alone():
    def body(comm):
        own = comms.symmetric(comm, comm)
        memory = own.allocate(4000).view(torch.float32)
        memory.copy_(sample(comm.rank, 1000))
        before = memory.clone()
        assert _C.sum_in_place(own, memory[101:777], 0.5)
        outside = torch.ones(1000, dtype=torch.bool)
        outside[101:777] = False
        return same_bits(memory[outside], before[outside]), memory[101:777].clone()

    results = ranks.run_ranks(3, body)
    expected = sum(sample(rank, 1000)[101:777] for rank in range(3)) * 0.5
    for left_alone, summed in results:
        assert left_alone
        assert same_bits(summed, expected)


def test_memory_that_is_not_shared_goes_through_the_transport():
    def body(comm):
        own = comms.symmetric(comm, comm)
        plain, integers = sample(comm.rank, 100), torch.arange(10) * (comm.rank + 1)
        shared_integers = own.allocate(80).view(torch.int64).copy_(integers)
        direct = [_C.sum_in_place(own, x, 1.0) for x in (plain, integers, shared_integers)]
        for x in (plain, integers, shared_integers):
            own.all_reduce(x).wait()
        return direct, plain, integers, shared_integers.clone()

    for direct, plain, integers, shared_integers in ranks.run_ranks(2, body):
        assert direct == [False, False, False]
        torch.testing.assert_close(plain, sample(0, 100) + sample(1, 100))
        assert torch.equal(integers, torch.arange(10) * 3)
        assert torch.equal(shared_integers, integers)


def test_bytes_are_counted_as_over_the_transport():
    def body(comm):
        own = comms.symmetric(comm, comm)
        memory = own.allocate(4096 * 4).view(torch.float32)
        counts = []
        for codec in (None, gs.Int8()):
            for group, x in ((own, memory), (comm, torch.zeros(4096))):
                gs.all_reduce(x, codec=codec, deterministic=True, group=group)  # allocates memory, once
                before = group.bytes_sent
                gs.all_reduce(x, codec=codec, deterministic=True, group=group)
                counts.append(group.bytes_sent - before)
        return counts

    for exact, exact_plain, coded, coded_plain in ranks.run_ranks(2, body):
        assert exact == exact_plain > 0
        assert coded == coded_plain > 0
        assert coded < exact / 3


def test_freed_memory_is_unmapped_at_the_next_allocation():
    def mapped():
        with open("/proc/self/maps") as file:
            return sum("memfd:gossamer" in line for line in file)

    def body(comm):
        own = comms.symmetric(comm, comm)
        kept = own.allocate(100_000)
        before = mapped()
        for _ in range(20):
            own.allocate(100_000)
        gc.collect()
        grown = mapped() - before
        return grown, _C.sum_in_place(own, kept.view(torch.float32), 1.0)

    for grown, found in ranks.run_ranks(2, body):
        assert grown < 20
        assert found


ALGORITHMS = [
    "gradient_allreduce",
    "bytegrad",
    gs.GradientAllReduce(deterministic=True),
    gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.OneBit())),
    gs.PowerSGD(rank=1),
]


def weights_and_sums(group, comm, algorithm):
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"algorithm": copy.deepcopy(algorithm), "bucket_bytes": 1500, "first_bucket_bytes": 400}
    wrapped = gs.DataParallel(model, optimizer, process_group=group, **options)
    trained(wrapped, optimizer, shards(6, comm))
    direct = [
        _C.sum_in_place(wrapped.engine._comm, bucket.flat("grad"), 1.0) for bucket in wrapped.engine.buckets
    ]
    wrapped.close()
    return torch.cat([param.detach().flatten() for param in model.parameters()]), direct


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_model_trains_to_the_same_bits_with_symmetric_buckets(algorithm):
    def body(comm, other):
        weights, direct = weights_and_sums(gs.Symmetric(comm), comm, algorithm)
        plain, _ = weights_and_sums(other, other, algorithm)
        return weights, plain, direct

    results = ranks.run_ranks(3, body, groups=2)
    for weights, plain, direct in results:
        assert torch.equal(weights, plain)
        assert torch.equal(weights, results[0][0])
        assert direct
        assert all(direct)


def test_a_group_of_one_rank_is_left_as_it_is():
    def body(comm):
        return comms.symmetric(comm, comm) is comm

    assert ranks.run_ranks(1, body) == [True]


def test_another_backend_on_the_cpu_is_refused_on_every_rank():
    ranks.choose_backend("gloo")

    def body(comm):
        own = comms.symmetric(comm, comm)
        own.allocate(64)

    for error in ranks.run_ranks(2, body, errors=True):
        assert isinstance(error, gs.CommError)
        assert "must use the backend 'gossamer' for CPU tensors, got 'gloo'" in str(error)
        assert "rank 0: " in str(error)
        assert "rank 1: " in str(error)


def test_more_ranks_than_kernels_take_are_refused():
    class Large:
        size = comms.MAX_RANKS + 1

    with pytest.raises(gs.ConfigError, match="at most 72 ranks can share memory, got 73"):
        comms.symmetric(Large(), Large())


def test_a_rank_that_dies_ends_the_others_waits_with_its_name():
    def body(comm):
        own = comms.symmetric(comm, comm)
        x = own.allocate(400).view(torch.float32)
        if comm.rank == 1:
            comm.announce_failure()
            return None
        return _C.sum_in_place(own, x, 1.0)

    first, second, third = ranks.run_ranks(3, body, errors=True)
    assert second is None
    for error in (first, third):
        assert isinstance(error, gs.CommError)
        assert "with rank 1" in str(error)
