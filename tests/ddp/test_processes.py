"""gs.DistributedDataParallel beside torch's DDP in a job of two processes: tests that need a default group.

Join, PowerSGD's hooks, pickles and copies, device meshes, torch's checkpoints, torch.compile.
"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Stock

import gossamer as gs
from tests.support.jobs import Job

pytestmark = pytest.mark.usefixtures("job")

Ours = gs.DistributedDataParallel


@pytest.fixture(scope="module")
def job():
    with Job(2) as job, job.within(gs.init, gs.shutdown, backend="gloo"):
        yield job


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 12), nn.Linear(12, 4))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def build(kind, **options):
    inner = network()
    return kind(inner, **options), optimizer_of(inner)


def build_with_optimizer(kind):
    """Our wrapper is given the optimizer, which torch's does not take."""
    inner = network()
    optimizer = optimizer_of(inner)
    return kind(inner, **({"optimizer": optimizer} if kind is Ours else {})), optimizer


def train(model, optimizer, count, seed=0):
    for k in range(count):
        generator = torch.Generator().manual_seed(100 * seed + 10 * k + gs.rank())
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def require_equal(theirs, ours, tolerance=0):
    assert list(theirs) == list(ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("divide", [True, False])
def test_joins_of_uneven_inputs_train_like_torchs(divide):
    """torch's DDP under its join; ours under ours and under torch's Join.

    The last rank joins last, so that buffers have one source.
    """
    states = []
    for kind, own in ((Stock, True), (Ours, True), (Ours, False)):
        model, optimizer = build_with_optimizer(kind)
        for epoch in range(2):
            around = model.join(divide) if own else Join([model], divide_by_initial_world_size=divide)
            with around:
                train(model, optimizer, 2 + 2 * gs.rank(), epoch)
        states.append(state(model))
    for ours in states[1:]:
        require_equal(states[0], ours, 1e-6)


def power(**options):
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, min_compression_rate=0.5, start_powerSGD_iter=2, **options
    )


POWERSGD = {
    "default": lambda model: model.register_comm_hook(power(), powerSGD_hook.powerSGD_hook),
    "warm-start-off": lambda model: model.register_comm_hook(
        power(warm_start=False, use_error_feedback=False), powerSGD_hook.powerSGD_hook
    ),
    "in-fp16": lambda model: model.register_comm_hook(
        power(orthogonalization_epsilon=1e-2),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "by-enum": lambda model: register_ddp_comm_hook(DDPCommHookType.POWER_SGD, model),
}


@pytest.mark.parametrize("register", POWERSGD)
def test_powersgd_hooks_train_to_the_bits_of_torchs_ddp(register):
    states = []
    for kind in (Stock, Ours):
        model, optimizer = build(kind)
        POWERSGD[register](model)
        train(model, optimizer, 6)
        states.append(state(model))
    require_equal(*states)


@pytest.mark.parametrize("by", ["pickle", "deepcopy"])
@pytest.mark.parametrize(
    "options",
    [{}, {"algorithm": gs.ByteGrad(), "static_graph": True}, {"find_unused_parameters": True}],
    ids=["default", "static-graph", "find-unused"],
)
def test_pickles_and_copies_go_on_as_the_model_they_were_made_of(options, by):
    model, optimizer = build(Ours, **options)
    train(model, optimizer, 1)
    again = pickle.loads(pickle.dumps(model)) if by == "pickle" else copy.deepcopy(model)
    assert type(again) is Ours
    assert again.static_graph == model.static_graph
    train(again, optimizer_of(again), 2, 7)
    straight = copy.deepcopy(model)
    train(straight, optimizer_of(straight), 2, 7)
    assert repr(again.algorithm) == repr(model.algorithm)
    require_equal(state(straight), state(again))
    assert not torch.equal(again.module[0].weight, model.module[0].weight)


def test_a_pickle_keeps_the_registered_hook():
    model, _ = build(Ours)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    again = pickle.loads(pickle.dumps(model))
    train(again, optimizer_of(again), 1)
    assert again.algorithm.hook == "allreduce_hook"


@pytest.mark.parametrize("kind", [Stock, Ours], ids=["torch", "gossamer"])
def test_a_model_on_another_group_is_not_pickled(kind):
    model, _ = build(kind, process_group=dist.new_group())
    text = "DDP Pickling/Unpickling are only supported when using DDP with the default process"
    with pytest.raises(RuntimeError, match=text):
        pickle.dumps(model)


def test_a_device_mesh_of_one_dimension_and_torchs_checkpoints_take_it_for_a_ddp():
    mesh = init_device_mesh("cpu", (gs.size(),))
    model, optimizer = build(Ours, device_mesh=mesh)
    assert model.process_group is mesh.get_group(0)
    train(model, optimizer, 2)
    theirs, other = build(Stock, device_mesh=mesh)
    train(theirs, other, 2)
    require_equal(state(theirs), state(model))
    assert list(get_model_state_dict(model)) == list(model.module.state_dict())


@pytest.mark.parametrize("compiled", ["the-model-inside", "the-wrapper"])
def test_a_compiled_model_trains_like_a_plain_one(compiled):
    reference, optimizer = build(Ours)
    train(reference, optimizer, 3)
    model, optimizer = build(Ours)
    if compiled == "the-wrapper":
        train(torch.compile(model, backend="aot_eager"), optimizer, 3)
    else:
        model.module.compile(backend="aot_eager")
        train(model, optimizer, 3)
    require_equal(state(reference), state(model), 1e-6)
