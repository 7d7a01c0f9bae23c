"""gs.DistributedDataParallel in real processes: tests that need a default group, or a random generator for each rank.

Join beside torch's DDP, PowerSGD's hooks, pickles and copies, device meshes, torch's checkpoints, torch.compile.
"""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as Stock

import gossamer as gs
from tests.support.models import mlp
from tests.support.ranks import run_job, run_ranks

JOB = """
import copy, io, pickle, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import register_ddp_comm_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Stock
import gossamer as gs

gs.init(backend="gloo")
rank, size = gs.rank(), gs.size()
Ours = gs.DistributedDataParallel

def build(kind, **options):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 12), nn.Linear(12, 4))
    if kind is Ours and options.pop("watched", False):
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
        return kind(inner, optimizer=optimizer, **options), optimizer
    options.pop("watched", None)
    return kind(inner, **options), torch.optim.SGD(inner.parameters(), lr=0.05)

def train(model, optimizer, count, seed=0):
    for k in range(count):
        generator = torch.Generator().manual_seed(100 * seed + 10 * k + rank)
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()

def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}

def require_equal(theirs, ours, tolerance=0):
    assert list(theirs) == list(ours), (list(theirs), list(ours))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")

# uneven inputs: torch's DDP under its join, ours under ours and under torch's Join; the last rank joins last, so that
# buffers have one source
for divide in (True, False):
    states = []
    for kind, own in ((Stock, True), (Ours, True), (Ours, False)):
        model, optimizer = build(kind, watched=True)
        for epoch in range(2):
            around = model.join(divide) if own else Join([model], divide_by_initial_world_size=divide)
            with around:
                train(model, optimizer, 2 + 2 * rank, epoch)
        states.append(state(model))
    for ours in states[1:]:
        require_equal(states[0], ours, 1e-6)

# PowerSGD
def power(**options):
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, min_compression_rate=0.5, **options)

hooks = {
    "powerSGD": lambda model: model.register_comm_hook(power(start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    "warm start off": lambda model: model.register_comm_hook(
        power(start_powerSGD_iter=2, warm_start=False, use_error_feedback=False), powerSGD_hook.powerSGD_hook),
    "in fp16": lambda model: model.register_comm_hook(
        power(start_powerSGD_iter=2, orthogonalization_epsilon=1e-2),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "by enum": lambda model: register_ddp_comm_hook(DDPCommHookType.POWER_SGD, model),
}
for name, register in hooks.items():
    states = []
    for kind in (Stock, Ours):
        model, optimizer = build(kind)
        register(model)
        train(model, optimizer, 6)
        states.append(state(model))
    require_equal(*states)

# pickles and copies go on as the model they were made of
for options in ({}, {"algorithm": gs.ByteGrad(), "static_graph": True}, {"find_unused_parameters": True}):
    model, optimizer = build(Ours, **options)
    train(model, optimizer, 1)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is Ours and again.static_graph == model.static_graph
        train(again, torch.optim.SGD(again.parameters(), lr=0.05), 2, 7)
        straight = copy.deepcopy(model)
        train(straight, torch.optim.SGD(straight.parameters(), lr=0.05), 2, 7)
        assert repr(again.algorithm) == repr(model.algorithm)
        require_equal(state(straight), state(again))
        assert not torch.equal(again.module[0].weight, model.module[0].weight)
model, optimizer = build(Ours)
model.register_comm_hook(None, default_hooks.allreduce_hook)
again = pickle.loads(pickle.dumps(model))
train(again, torch.optim.SGD(again.parameters(), lr=0.05), 1)
assert again.algorithm.hook == "allreduce_hook"
model, _ = build(Ours, process_group=dist.new_group())
for kind, other in ((Stock, build(Stock, process_group=dist.new_group())[0]), (Ours, model)):
    try:
        pickle.dumps(other)
    except RuntimeError as error:
        assert "DDP Pickling/Unpickling are only supported when using DDP with the default process" in str(error), error
    else:
        raise AssertionError("pickled")

# a device mesh of one dimension, and torch's distributed checkpoints, which take it for a DDP
mesh = init_device_mesh("cpu", (size,))
model, optimizer = build(Ours, device_mesh=mesh)
assert model.process_group is mesh.get_group(0)
train(model, optimizer, 2)
theirs, other = build(Stock, device_mesh=mesh)
train(theirs, other, 2)
require_equal(state(theirs), state(model))
assert list(get_model_state_dict(model)) == list(model.module.state_dict())

# torch.compile of the model inside, and of the wrapper
reference, optimizer = build(Ours)
train(reference, optimizer, 3)
inside, optimizer = build(Ours)
inside.module.compile(backend="aot_eager")
train(inside, optimizer, 3)
require_equal(state(reference), state(inside), 1e-6)
outside, optimizer = build(Ours)
train(torch.compile(outside, backend="aot_eager"), optimizer, 3)
require_equal(state(reference), state(outside), 1e-6)
gs.shutdown()
if rank == 0:
    print("all claims hold")
"""


def test_join_hooks_pickles_meshes_and_compiled_models_beside_torchs_ddp(tmp_path):
    assert "all claims hold" in run_job(JOB, 2, tmp_path)


def test_lightning_and_accelerate_take_it_for_one_of_torchs():
    types = pytest.importorskip("lightning.pytorch.utilities.types")
    other = pytest.importorskip("accelerate.utils.other")

    def body(comm):
        model = gs.DistributedDataParallel(mlp(), process_group=comm)
        assert isinstance(model, types.DistributedDataParallel)
        assert isinstance(model, Stock)
        assert other.extract_model_from_parallel(model) is model.module
        assert other.extract_model_from_parallel(torch.nn.Sequential(model))[0] is model
        model.close()

    run_ranks(1, body)
