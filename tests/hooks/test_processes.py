# Hooks for stock torch DDP in real processes, on torch's default group: connections of their own, uneven inputs, a
# compiled model, and a compiled backward (where torch calls a hook with a gradient and its parameter).

from tests.support.ranks import run_job

JOB = """
import torch, torch.distributed as dist, gossamer as gs
from torch import nn
from torch._dynamo import compiled_autograd, config
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
inputs = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
mine = inputs[12 // size * rank :][: 12 // size]

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 23), nn.Tanh(), nn.Linear(23, 5))

def step(call, model):
    model.zero_grad()
    call(mine).square().mean().backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])

alone = build()
alone(inputs).square().mean().backward()
exact = torch.cat([param.grad.flatten() for param in alone.parameters()])

def check(grads, what, error=0.02):
    every = [torch.empty_like(grads) for _ in range(size)]
    dist.all_gather(every, grads)
    assert all(torch.equal(each, grads) for each in every), what
    relative = (grads - exact).norm() / exact.norm()
    assert 0 < relative < error, (what, relative)

# A State that is made before the process has a model to wrap, as trainers do.
model = build()
state = gs.hooks.State(model)
ddp = DDP(model)
ddp.register_comm_hook(state, gs.hooks.bytegrad)
plain = step(ddp, model)
check(plain, "plain")
with ddp.join():
    for _ in range(2 + rank):
        model.zero_grad()
        ddp(mine).square().mean().backward()
state.close()

model = build()
ddp = DDP(model, bucket_cap_mb=2)
ddp.register_comm_hook(gs.hooks.State(ddp), gs.hooks.bytegrad)
compiled = torch.compile(ddp, backend="aot_eager")
for _ in range(2):
    check(step(compiled, model), "DDPOptimizer")

config.optimize_ddp = "python_reducer"
model = build()
ddp = DDP(model)
ddp.register_comm_hook(gs.hooks.State(ddp), gs.hooks.int8)
first = step(ddp, model)
check(first, "gradient by gradient")
graphs = []

def recorded(graph, example):
    graphs.append(graph.code)
    return graph.forward

model = build()
ddp = DDP(model)
state = gs.hooks.State(ddp)
ddp.register_comm_hook(state, gs.hooks.int8)
compiled = torch.compile(ddp, backend="aot_eager")
with compiled_autograd._enable(torch.compile(backend=recorded)):
    grads = step(compiled, model)
check(grads, "compiled backward")
assert torch.equal(grads, first), "compiled against eager"
assert sum(code.count("gossamer.hook_mean") for code in graphs) == 4, graphs
assert set(state.state_dict()["errors"]) == {name for name, _ in model.named_parameters()}

other = dist.new_group(list(range(size)))
try:
    gs.hooks.State(ddp, process_group=other)
except gs.ConfigError as error:
    assert "process_group must be the one that the model averages over" in str(error)
else:
    raise AssertionError("another group")
print("rank", rank, "good", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_hooks_in_processes_compiled_and_with_uneven_inputs(tmp_path):
    assert run_job(JOB, 2, tmp_path).count("good") == 2
