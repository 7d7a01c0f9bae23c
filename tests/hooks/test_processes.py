"""Hooks for stock torch DDP in real processes, on torch's default group.

Connections of their own, uneven inputs, a compiled model, and a compiled backward, in which torch calls a hook with a
gradient and its parameter.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd, config
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from tests.support.jobs import Job

pytestmark = pytest.mark.usefixtures("job")


@pytest.fixture(scope="module")
def job():
    with Job(2) as job, job.within(dist.init_process_group, dist.destroy_process_group, backend="gloo"):
        yield job


def inputs():
    return torch.randn(12, 10, generator=torch.Generator().manual_seed(1))


def mine():
    rank, size = dist.get_rank(), dist.get_world_size()
    return inputs()[12 // size * rank :][: 12 // size]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 23), nn.Tanh(), nn.Linear(23, 5))


def gradients(model, call, batch):
    model.zero_grad()
    call(batch).square().mean().backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def assert_equal_on_all_ranks_and_near_the_exact_ones(grads):
    every = [torch.empty_like(grads) for _ in range(dist.get_world_size())]
    dist.all_gather(every, grads)
    assert all(torch.equal(each, grads) for each in every)
    alone = build()
    exact = gradients(alone, alone, inputs())
    assert 0 < (grads - exact).norm() / exact.norm() < 0.02


def test_a_state_is_made_before_the_model_is_wrapped_and_inputs_may_be_uneven():
    """Trainers make the state first."""
    model = build()
    state = gs.hooks.State(model)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, gs.hooks.bytegrad)
    assert_equal_on_all_ranks_and_near_the_exact_ones(gradients(model, ddp, mine()))
    with ddp.join():
        for _ in range(2 + dist.get_rank()):
            gradients(model, ddp, mine())
    state.close()


def test_a_compiled_model_whose_graph_is_split_at_buckets():
    model = build()
    ddp = DistributedDataParallel(model, bucket_cap_mb=2)
    ddp.register_comm_hook(gs.hooks.State(ddp), gs.hooks.bytegrad)
    compiled = torch.compile(ddp, backend="aot_eager")
    for _ in range(2):
        assert_equal_on_all_ranks_and_near_the_exact_ones(gradients(model, compiled, mine()))


@config.patch(optimize_ddp="python_reducer")
def test_a_compiled_backward_gives_the_bits_of_the_plain_one():
    model = build()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(gs.hooks.State(ddp), gs.hooks.int8)
    plain = gradients(model, ddp, mine())
    assert_equal_on_all_ranks_and_near_the_exact_ones(plain)
    graphs = []

    def recorded(graph, example):
        graphs.append(graph.code)
        return graph.forward

    model = build()
    ddp = DistributedDataParallel(model)
    state = gs.hooks.State(ddp)
    ddp.register_comm_hook(state, gs.hooks.int8)
    compiled = torch.compile(ddp, backend="aot_eager")
    with compiled_autograd._enable(torch.compile(backend=recorded)):
        grads = gradients(model, compiled, mine())
    assert_equal_on_all_ranks_and_near_the_exact_ones(grads)
    assert torch.equal(grads, plain)
    assert sum(code.count("gossamer.hook_mean") for code in graphs) == 4, graphs
    assert set(state.state_dict()["errors"]) == {name for name, _ in model.named_parameters()}


def test_a_group_that_the_model_does_not_average_over_is_refused():
    ddp = DistributedDataParallel(build())
    other = dist.new_group(list(range(dist.get_world_size())))
    with pytest.raises(gs.ConfigError, match="process_group must be the one that the model averages over"):
        gs.hooks.State(ddp, process_group=other)
