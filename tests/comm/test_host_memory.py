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
