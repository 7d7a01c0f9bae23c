"""Buffers under gs.DistributedDataParallel: hooks in the place of the copy from rank 0, and algorithms without a copy.

Ranks are threads. The plain copy, by torch's two arguments, is in test_arguments.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import gossamer as gs
from gossamer.comm import is_communicator
from tests.support.models import batches, flat_weights, seeded, shard, square
from tests.support.ranks import run_ranks
from tests.support.stock import run_beside, wrap


class Counting(nn.Module):
    """Its output depends on the buffer; each forward adds the rank's number to the buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 4)
        self.register_buffer("seen", torch.zeros(3))
        self.step = 0.0

    def forward(self, x):
        self.seen.add_(self.step)
        return self.layer(x) + self.seen.sum()


def total(state, buffers):
    """An all-reduce of each buffer; the state records its calls."""
    group, calls = state
    calls.append(sorted(buffers))
    works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers.values()]
    return [work.get_future() for work in works]


def total_at_once(state, buffers):
    for future in total(state, buffers):
        future.wait()


def of_rank_1(state, buffers):
    model, calls = state
    calls.append(sorted(buffers))
    model._default_broadcast_coalesced(list(buffers.values()), authoritative_rank=1)


def test_a_hook_for_buffers_can_copy_them_from_a_rank_as_under_torchs_ddp():
    def body(comm, group):
        results = []
        for kind in (Stock, gs.DistributedDataParallel):
            model, calls = wrap(kind, seeded(Counting), comm, group, {}), []
            model.module.step = comm.rank + 1.0
            model._register_buffer_comm_hook((model, calls), of_rank_1)
            for batch in batches(3):
                square(model(shard(batch, comm))).backward()
            model.module.seen.fill_(comm.rank)
            model._default_broadcast_coalesced()
            results.append((model.module.seen.tolist(), flat_weights(model), calls))
        return results

    for theirs, ours in run_beside(2, body):
        assert theirs[0] == ours[0] == [0.0] * 3
        assert torch.equal(theirs[1], ours[1])
        assert theirs[2] == ours[2] == [["seen"]] * 3


@pytest.mark.parametrize("location", list(Location), ids=lambda location: location.name)
def test_a_hook_for_buffers_does_what_it_does_under_torchs_ddp(location):
    def body(comm, group):
        results = []
        for kind in (Stock, gs.DistributedDataParallel):
            model, calls = wrap(kind, seeded(Counting), comm, group, {}), []
            model.module.step = comm.rank + 1.0
            hook = total_at_once if location is Location.PRE_FORWARD else total
            model._register_buffer_comm_hook((group, calls), hook, location)
            for batch in batches(3):
                square(model(shard(batch, comm))).backward()
            results.append((model.module.seen.clone(), flat_weights(model), calls))
        return results

    for theirs, ours in run_beside(2, body):
        assert torch.equal(theirs[0], ours[0])
        assert torch.equal(theirs[1], ours[1])
        assert theirs[2] == ours[2] == [["seen"]] * 3


def test_a_hook_for_buffers_is_refused_where_it_cannot_run():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(Counting), process_group=comm)
        for wrong in ({"hook": 3}, {"hook": print, "comm_hook_location": "PRE_FORWARD"}):
            with pytest.raises(gs.ConfigError, match=r"must be (callable|a _BufferCommHookLocation), got"):
                model._register_buffer_comm_hook(None, **wrong)
        model._register_buffer_comm_hook(None, lambda state, buffers: None)
        with pytest.raises(gs.UsageError, match="cannot take part in the hook"), model.join():
            model(batches(1)[0])

    run_ranks(1, body)


def counted(comm, **options):
    module = seeded(Counting)
    module.step = comm.rank + 1.0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert is_communicator(comm)
    model = gs.DistributedDataParallel(module, process_group=comm, optimizer=optimizer, **options)
    for batch in batches(4):
        optimizer.zero_grad()
        square(model(shard(batch, comm))).backward()
        optimizer.step()
    own = module.seen.clone()
    model.consensus()
    model.close()
    return own.mean().item(), module.seen.mean().item()


@pytest.mark.parametrize(
    "make", [lambda: gs.AsyncModelAverage(1), lambda: gs.LocalSGD(2)], ids=["async", "local"]
)
def test_buffers_stay_each_ranks_own_where_ranks_do_not_wait_for_each_other(make):
    ranks = run_ranks(2, lambda comm: counted(comm, algorithm=make()))
    assert ranks == [(4.0, 6.0), (8.0, 6.0)]  # the mean only by consensus()

    def body(comm):
        for asked in ({"broadcast_buffers": True}, {"forward_sync_buffers": True}):
            with pytest.raises(gs.ConfigError, match=r"without waiting for each other.*; leave both out"):
                counted(comm, algorithm=make(), **asked)

    run_ranks(1, body)


def test_local_sgd_in_lockstep_copies_buffers_as_others_do():
    ranks = run_ranks(2, lambda comm: counted(comm, algorithm=gs.LocalSGD(2, lockstep=True)))
    assert [own for own, _ in ranks] == [4.0, 5.0]
