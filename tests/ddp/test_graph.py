"""gs.DistributedDataParallel: which parameters a backward reaches, static graphs, backwards that cannot be averaged.

Texts and gradients are compared with torch's DDP in the same threads.
"""

import re
import time
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint

import gossamer as gs
from tests.support.models import batches, flat_grads, mlp, seeded, shard, square
from tests.support.ranks import run_ranks
from tests.support.stock import both, run_beside, wrap


class Branches(nn.Module):
    """Two halves; a call may leave one out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = nn.Linear(10, 6), nn.Linear(10, 6), nn.Linear(2, 2)

    def forward(self, x, use=("first", "second")):
        return sum(getattr(self, name)(x) for name in use)


class Halves(Branches):
    def __init__(self):
        super().__init__()
        del self.never


def backward(model, comm, use=("first", "second"), step=0):
    square(model(shard(batches(step + 1)[step], comm), use)).backward()


@pytest.fixture
def debug_level(request):
    before = dist.get_debug_level()
    dist.set_debug_level(request.param)
    yield
    dist.set_debug_level(before)


@pytest.mark.parametrize("debug_level", [dist.DebugLevel.OFF, dist.DebugLevel.INFO], indirect=True, ids=str)
@pytest.mark.parametrize("static", [False, True], ids=["unused", "static graph"])
def test_a_parameter_left_out_gives_torchs_text_in_the_next_forward(static, debug_level):
    def body(comm, group):
        texts = []
        for kind in (Stock, gs.DistributedDataParallel):
            model = wrap(kind, seeded(Halves), comm, group, {"static_graph": static})
            if static:
                backward(model, comm)
            backward(model, comm, ["first"])
            with pytest.raises(RuntimeError, match="Expected to have finished reduction") as error:
                backward(model, comm)
            texts.append(str(error.value))
        with pytest.raises(gs.ConfigError, match="finished reduction in the prior iteration"):
            backward(model, comm)  # again
        model.close()
        return texts

    ((theirs, ours),) = run_beside(1, body)
    assert "indices which did not receive grad for rank 0: 2 3" in ours
    # torch lists names in any order
    assert sorted(re.split(r"[ ,\n]+", theirs)) == sorted(re.split(r"[ ,\n]+", ours))
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        assert theirs == ours


def test_a_parameter_that_is_frozen_later_is_left_out_too():
    def body(comm, group):
        texts = []
        for kind in (Stock, gs.DistributedDataParallel):
            model = wrap(kind, seeded(Halves), comm, group, {})
            backward(model, comm)
            model.module.second.weight.requires_grad_(False)
            backward(model, comm)
            with pytest.raises(RuntimeError, match="Expected to have finished reduction") as error:
                backward(model, comm)
            texts.append(str(error.value))
        model.close()
        return texts

    for theirs, ours in run_beside(2, body):
        assert "did not receive grad for rank" in ours
        assert theirs == ours


def test_a_parameter_left_out_on_one_rank_is_an_error_on_all():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(Halves), process_group=comm)
        backward(model, comm, ["first"] if comm.rank == 1 else ("first", "second"))
        try:
            backward(model, comm)
        finally:
            model.close()

    for error in run_ranks(3, body, errors=True):
        assert isinstance(error, RuntimeError)
        assert "did not receive grad for rank 1: 2 3" in str(error)
        assert "for rank 0" not in str(error)


def test_out_of_lockstep_a_parameter_left_out_is_an_error_on_that_rank_alone():
    def body(comm):
        inner = seeded(Halves)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        algorithm = gs.LocalSGD(period=50)
        model = gs.DistributedDataParallel(
            inner, process_group=comm, algorithm=algorithm, optimizer=optimizer
        )
        backward(model, comm, ["first"] if comm.rank == 1 else ("first", "second"))
        optimizer.step()
        try:
            backward(model, comm)
        finally:
            model.close()

    first, second = run_ranks(2, body, errors=True)
    assert first is None
    assert "did not receive grad for rank 1: 2 3" in str(second)


def test_two_backwards_of_one_forward_may_share_the_parameters():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(Halves), process_group=comm)
        for _ in range(2):
            model.zero_grad()
            x = shard(batches(1)[0], comm)
            model(x, ["first"]).square().mean().add(
                0 * model(x, ["first"]).mean()
            )  # a forward without a backward
            first, second = model.module.first, model.module.second
            model(x)
            one, other = square(first(x)), square(second(x))
            one.backward()
            other.backward()
        model.close()
        return flat_grads(model.module)

    first, second = run_ranks(2, body)
    assert first.numel() == 132
    assert torch.equal(first, second)


def unused(wrapper, comm, options):
    inner = seeded(Branches)
    model = wrapper(inner, **options)
    seen = []
    for step in range(3):
        inner.zero_grad()
        use = ["first"] if (comm.rank + step) % 2 else ["first", "second"]
        backward(model, comm, use, step)
        seen.append([None if param.grad is None else param.grad.clone() for param in inner.parameters()])
    return seen


def test_find_unused_parameters_gives_torchs_gradients():
    for theirs, ours in both(unused, {"find_unused_parameters": True}):
        for a, b in zip(chain(*theirs), chain(*ours), strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        assert [grad is None for grad in ours[0]] == [False] * 4 + [True] * 2


class Recomputed(nn.Module):
    """A layer used by two reentrant checkpoints, so its gradient comes twice in a backward; one used by none."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.never = nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(2, 2)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda each: self.shared(each).tanh(), x, use_reentrant=True)
        return x


def recomputed(wrapper, comm):
    inner = seeded(Recomputed)
    model = wrapper(inner, static_graph=True)
    seen = []
    for step in range(4):
        inner.zero_grad()
        square(model(shard(batches(4)[step], comm))).backward()
        seen.append(flat_grads(inner))
    return seen


def test_a_static_graph_may_use_a_parameter_twice_and_leave_another_out():
    for theirs, ours in both(recomputed):
        assert all(map(torch.equal, theirs, ours))
        assert ours[0].numel() == 88 + 72


def test_a_parameter_used_twice_by_reentrant_checkpoints_needs_a_static_graph():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(Recomputed), process_group=comm)
        with pytest.raises(gs.ConfigError, match="got its gradient twice in one backward"):
            square(model(shard(batches(1)[0], comm))).backward()
        model.close()

    run_ranks(2, body)


class Repeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(10, 8), nn.Linear(8, 8)

    def forward(self, x, times):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def test_a_static_graph_that_changes_is_an_error():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(Repeats), process_group=comm, static_graph=True)
        square(model(batches(1)[0], 1)).backward()
        with pytest.raises(
            gs.ConfigError, match="times in one backward, and 1 times in the first; with static_graph"
        ):
            square(model(batches(1)[0], 2)).backward()
        model.close()

    run_ranks(2, body)


def test_set_static_graph_is_the_argument_given_later():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(Recomputed), process_group=comm)
        model._set_static_graph()
        assert model.static_graph
        with pytest.warns(UserWarning, match="no need to set it again"):
            model._set_static_graph()
        for step in range(2):
            model.zero_grad()
            square(model(shard(batches(2)[step], comm))).backward()
        model.close()
        return flat_grads(model.module)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_a_static_graph_sends_buckets_while_backward_runs_from_its_second_step_on():
    order = []

    class Noting(gs.Algorithm):
        def bucket_ready(self, bucket):
            order.append(bucket.index)

    def body(comm):
        inner = seeded(mlp)
        model = gs.DistributedDataParallel(
            inner, process_group=comm, static_graph=True, bucket_cap_mb=0.0001, algorithm=Noting()
        )

        def note(_):
            time.sleep(0.1)  # the worker goes on meanwhile
            order.append("first layer's gradient")

        inner[0].weight.register_post_accumulate_grad_hook(note)
        for _ in range(2):
            square(model(batches(1)[0])).backward()
        model.close()
        return len(model.engine.buckets)

    (count,) = run_ranks(1, body)
    assert order[0] == "first layer's gradient"
    assert order[-1] == count - 1
    assert order[count + 1 :].index("first layer's gradient") > 0


def test_a_backward_that_keeps_its_graph_for_another_is_refused():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm)
        with pytest.raises(gs.ConfigError, match=r"has a gradient with a graph \(create_graph=True\)"):
            square(model(shard(batches(1)[0], comm))).backward(create_graph=True)
        with model.no_sync():
            square(model(shard(batches(1)[0], comm))).backward(create_graph=True)
        model.close()

    run_ranks(2, body)
