"""Sums through memory of the host: when they are chosen, and what they give. On the CPU; the GPUs are pretended.

tests/late has a device that does not share the host's memory by itself, tests/gpu/test_host_memory.py a GPU.
"""

import gc
import logging
import sys
import threading
from datetime import timedelta
from uuid import UUID

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from gossamer import _C
from gossamer import comm as comms
from tests.support import ranks
from tests.support.codec_cases import CODECS
from tests.support.models import mlp, seeded, shards, trained
from tests.support.shared_memory import errors_have_the_same_bits, same_bits, sample, sums_have_the_same_bits

SIZES = [0, 1, 257, 1021, 10_007]
HERE = threading.local()


@pytest.mark.parametrize("codec", [None, *CODECS], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_the_two_shot_over_the_transport(size, codec):
    def body(comm):
        return sums_have_the_same_bits(comms.host_memory(comm, comm), comm, codec, SIZES)

    assert ranks.run_ranks(size, body) == [True] * size


def test_error_feedback_keeps_the_same_errors():
    def body(comm):
        return errors_have_the_same_bits(comms.host_memory(comm, comm), comm)

    assert ranks.run_ranks(3, body) == [True] * 3


def test_exact_sums_go_through_the_memory_and_buckets_stay_out_of_it():
    def body(comm):
        own = comms.host_memory(comm, comm)
        bucket = own.allocate(4000).view(torch.float32).copy_(sample(comm.rank, 1000))
        plain = bucket.clone()
        before = comm.bytes_sent
        assert _C.sum(own, bucket)
        through_the_group = comm.bytes_sent - before
        gs.all_reduce(plain, deterministic=True, group=comm)
        return _C.sum_in_place(own, bucket, 1.0), through_the_group, same_bits(bucket, plain)

    assert ranks.run_ranks(2, body) == [(False, 0, True)] * 2


def test_what_is_no_sum_of_floats_goes_through_the_group():
    def body(comm):
        own = comms.host_memory(comm, comm)
        integers = torch.arange(10) * (comm.rank + 1)
        assert _C.sum(own, integers)
        sent = torch.full((3,), comm.rank)
        own.broadcast(sent, 1).wait()
        return integers.tolist(), sent.tolist()

    assert ranks.run_ranks(2, body) == [([3 * i for i in range(10)], [1, 1, 1])] * 2


def test_a_model_trains_to_the_same_bits(backend):
    def body(comm, other):
        weights, ways = [], []
        for group in (gs.HostMemory(comm), other):
            module = seeded(mlp)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            options = {"bucket_bytes": 900, "first_bucket_bytes": 400, "process_group": group}
            codec = gs.ErrorFeedback(gs.OneBit())
            model = gs.DataParallel(module, optimizer, algorithm=gs.GradientAllReduce(codec=codec), **options)
            trained(model, optimizer, shards(6, comm))
            ways.append(model.report()["sums"])
            weights.append(torch.cat([param.detach().flatten() for param in module.parameters()]))
            model.close()
        return same_bits(*weights), ways[0]

    assert ranks.run_ranks(3, body, groups=2) == [(True, "through host memory, as asked")] * 3


def mapped():
    with open("/proc/self/maps") as file:
        return sum("memfd:gossamer" in line for line in file)


def test_all_memory_is_given_back():
    def body(comm):
        for _ in range(3):
            own = comms.host_memory(comm, comm)
            for numel in (100, 5000, 100):
                gs.all_reduce(torch.ones(numel), codec=gs.Int8(), group=own)
            del own
            gc.collect()
            comm.all_reduce(torch.zeros(1)).wait()
        return

    before = mapped()
    ranks.run_ranks(3, body)
    gc.collect()
    assert mapped() == before


def test_a_rank_that_fails_ends_the_others_waits_with_its_name():
    def body(comm):
        own = comms.host_memory(comm, comm)
        x = torch.ones(100)
        gs.all_reduce(x, codec=gs.Int8(), group=own)
        if comm.rank == 1:
            own.announce_failure()
            return None
        return gs.all_reduce(x, codec=gs.Int8(), group=own)

    first, second, third = ranks.run_ranks(3, body, errors=True)
    assert second is None
    for error in (first, third):
        assert isinstance(error, gs.CommError)
        assert "rank 1 has failed" in str(error)


def test_a_lost_value_is_an_error_on_every_rank_that_names_the_pair(monkeypatch):
    monkeypatch.setattr(_C, "unreached_peers", lambda comm: [2] if comm.rank == 1 else [])
    for error in ranks.run_ranks(3, lambda comm: comms.host_memory(comm, comm), errors=True):
        assert isinstance(error, gs.ConfigError)
        assert (
            "HostMemory: values must arrive in memory of the host, but were lost between ranks 1 and 2"
            in str(error)
        )


def test_one_rank_is_left_as_it_is_and_too_many_are_refused():
    assert ranks.run_ranks(1, lambda comm: comms.host_memory(comm, comm) is comm) == [True]

    class Large:
        size = comms.MAX_RANKS + 1

    with pytest.raises(gs.ConfigError, match="at most 72 ranks can share memory, got 73"):
        comms.host_memory(Large(), Large())


# ---- what is chosen


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that each rank of connected() has a GPU. Returns the set of pairs of ranks without peer access."""
    symmetric, hierarchical = (sys.modules[f"gossamer.comm.{name}"] for name in ("symmetric", "hierarchical"))
    apart = set()
    monkeypatch.setattr(_C, "with_cuda", True)
    monkeypatch.setattr(symmetric, "visible_uuids", lambda: [str(UUID(int=rank + 1)) for rank in range(4)])
    monkeypatch.setattr(symmetric, "can_access", lambda index, peer: (index, peer) not in apart)
    monkeypatch.setattr(hierarchical, "host_memory", lambda comm, control: HERE.made)
    return apart


def connected(size, group_of=lambda comm: comm):
    """What connect_by_hosts() makes of ranks that pretend to have GPUs: whether it is the group itself, and its way."""
    store = dist.HashStore()

    def body(rank):
        own = dist.PrefixStore("ranks", store)
        control, comm, HERE.made = (
            comms.from_backend(
                dist.ProcessGroupGloo(dist.PrefixStore(name, own), rank, size, timedelta(seconds=30)),
                device=device,
                store=dist.PrefixStore(name, own),
                name=name,
            )
            for name, device in (("control", "cpu"), ("comm", f"cuda:{rank}"), ("made", f"cuda:{rank}"))
        )
        chosen = comms.connect_by_hosts(group_of(comm), comm, control)
        control.all_reduce(torch.zeros(1)).wait()
        return chosen is comm, comms.way_of(chosen)

    return ranks.run_threads(size, body)


def test_gpus_without_peer_access_are_joined_by_memory_of_the_host_which_the_report_and_the_log_say(
    gpus, caplog
):
    gpus.add((1, 2))
    with caplog.at_level(logging.INFO, logger="gossamer"):
        results = connected(3)
    for itself, way in results:
        assert not itself
        assert way.startswith("through host memory: the GPU of rank 1 (GPU-")
        assert "cannot access the GPU of rank 2" in way
    assert "sums of 3 ranks go through host memory: the GPU of rank 1" in caplog.text


def test_gpus_with_peer_access_stay_with_their_backend(gpus):
    assert connected(3) == [(True, "flat: 1 host x 3 ranks")] * 3


def test_flat_goes_without_memory_of_the_host(gpus):
    gpus.add((0, 1))
    assert connected(2, gs.Flat) == [(True, "flat, as asked")] * 2


def test_memory_of_the_host_can_be_asked_for(gpus):
    assert connected(2, gs.HostMemory) == [(False, "through host memory, as asked")] * 2


# ---- two levels

ISLANDS = {4: [[0, 1], [2, 3]], 5: [[0, 1, 2], [3, 4]], 3: [[0, 1], [2]]}


@pytest.fixture
def two_hosts(monkeypatch):
    """Ranks find themselves on the hosts of ISLANDS."""
    monkeypatch.setattr(
        sys.modules["gossamer.comm.hierarchical"], "hosts_of", lambda comm: ISLANDS[comm.size]
    )


@pytest.mark.parametrize("codec", [None, *CODECS], ids=str)
@pytest.mark.parametrize("size", ISLANDS)
def test_sums_of_several_hosts_have_the_bits_of_those_over_other_memory_of_the_hosts(size, codec):
    def body(comm):
        own, other = (
            comms.connect_by_hosts(kind(comm, hosts=ISLANDS[size]), comm, comm)
            for kind in (gs.HostMemory, gs.Hierarchical)
        )
        assert own.bytes_across == other.bytes_across == 0
        alike = []
        for call, numel in enumerate(SIZES):
            x = sample(10 * call + comm.rank, numel)
            results = [x.clone(), x.clone()]
            for group, tensor in zip((own, other), results, strict=True):
                gs.all_reduce(tensor, codec=codec, op="mean", nonce=call, group=group)
            alike.append(same_bits(*results))
        return all(alike), own.bytes_across == other.bytes_across

    assert ranks.run_ranks(size, body) == [(True, True)] * size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_error_feedback_between_hosts_keeps_the_same_errors_in_every_dtype(dtype):
    def body(comm):
        kinds = (gs.HostMemory(comm, ISLANDS[4]), gs.Hierarchical(comm, ISLANDS[4]))
        kept = []
        for kind in kinds:
            error = torch.zeros(1021, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
            for call in range(4):
                x = sample(10 * call + comm.rank, 1021).to(dtype)
                gs.all_reduce(x, codec=gs.ErrorFeedback(gs.Int4()), op="mean", error=error, group=kind)
            kept.append((x, error))
        (x, error), (other, owed) = kept
        return same_bits(x, other), same_bits(error, owed)

    assert ranks.run_ranks(4, body) == [(True, True)] * 4


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("codec", [None, gs.ErrorFeedback(gs.OneBit())], ids=str)
def test_a_model_on_several_hosts_trains_to_the_same_bits(codec):
    def body(comm, other):
        weights, ways = [], []
        for group in (gs.HostMemory(comm), other):
            module = seeded(mlp)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            options = {"bucket_bytes": 900, "first_bucket_bytes": 400, "process_group": group}
            model = gs.DataParallel(module, optimizer, algorithm=gs.GradientAllReduce(codec=codec), **options)
            trained(model, optimizer, shards(6, comm))
            ways.append(model.report()["sums"])
            weights.append(torch.cat([param.detach().flatten() for param in module.parameters()]))
            model.close()
        return same_bits(*weights), *ways

    ways = (
        "by hosts, through host memory inside each, as asked: 2 hosts x 2 ranks",
        "by hosts: 2 hosts x 2 ranks",
    )
    assert ranks.run_ranks(4, body, groups=2) == [(True, *ways)] * 4


@pytest.mark.usefixtures("two_hosts")
def test_each_host_without_peer_access_sums_through_its_memory_by_itself_and_says_so(gpus, monkeypatch):
    made = []
    monkeypatch.setattr(
        sys.modules["gossamer.comm.hierarchical"],
        "host_memory",
        lambda comm, control: made.append(control.device.type) or comm,
    )
    gpus.add((2, 3))
    results = connected(4)
    assert [way for _, way in results[:2]] == ["by hosts: 2 hosts x 2 ranks"] * 2
    for itself, way in results[2:]:
        assert not itself
        assert way.startswith(
            "by hosts: 2 hosts x 2 ranks; inside this host through host memory: the GPU of rank 2 (GPU-"
        )
        assert "cannot access the GPU of rank 3" in way
    assert made == ["cpu"] * 2


@pytest.mark.usefixtures("two_hosts")
def test_one_level_of_a_face_takes_memory_of_the_host_on_one_host_alone(gpus, monkeypatch):
    gpus.add((0, 1))
    face = lambda comm: gs.Flat(comm, host_memory=True)  # noqa: E731
    assert connected(4, face) == [(True, "flat, as asked: 2 hosts x 2 ranks")] * 4
    monkeypatch.undo()


@pytest.mark.usefixtures("two_hosts")
def test_a_host_that_cannot_make_its_memory_is_an_error_on_the_ranks_of_all_hosts(monkeypatch):
    def fail(comm, control):
        if comm.bytes_sent >= 0 and HERE.rank < 2:
            raise gs.CommError("host memory of 1 KB could not be shared; rank 0: out of memory")
        return comm

    monkeypatch.setattr(sys.modules["gossamer.comm.hierarchical"], "host_memory", fail)

    def body(comm):
        HERE.rank = comm.rank
        comms.connect_by_hosts(gs.HostMemory(comm), comm, comm)

    first, second, third, fourth = ranks.run_ranks(4, body, errors=True)
    for error in (first, second):
        assert "out of memory" in str(error)
    for error in (third, fourth):
        assert isinstance(error, gs.CommError)
        assert "ranks [0, 1] cannot sum through memory of their host" in str(error)


def test_hosts_of_several_machines_are_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["gossamer.comm.hierarchical"], "hosts_of", lambda comm: [[0, 1, 2], [3]])
    for error in ranks.run_ranks(
        4,
        lambda comm: comms.connect_by_hosts(gs.HostMemory(comm, ISLANDS[4]), comm, comm),
        errors=True,
    ):
        assert isinstance(error, gs.ConfigError)
        assert "the ranks of a host must be on one machine, got hosts [[0, 1], [2, 3]] on machines" in str(
            error
        )
