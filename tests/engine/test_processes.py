"""Real processes with torch's default group: gs.init, private groups, subgroups, several models. One job for all."""

import subprocess
import sys

import pytest

from tests.support.ranks import run_job

JOB = """
import torch, torch.distributed as dist
from torch import nn
import gossamer as gs

gs.init()
rank, size = gs.rank(), gs.size()

def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def train(wrapped, optimizer, steps=5, rank=rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(6, 8, generator=generator)).square().mean().backward()
        # the user's own collective on the default group, while the model has its private one
        dist.all_reduce(torch.ones(1))
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in wrapped.parameters()])

def equal_on(weights, group, ranks):
    every = [torch.empty_like(weights) for _ in ranks]
    dist.all_gather(every, weights, group=group)
    return all(torch.equal(every[0], other) for other in every)

# ranks that hold different numbers of groups, as with tensor parallelism, still wrap
dist.new_group([0])
inner = model(rank)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
wrapped = gs.DataParallel(inner, optimizer, algorithm="bytegrad")
assert equal_on(train(wrapped, optimizer), None, range(size))

# a second model on a subgroup, at the same time
pairs = [[0, 1], [2]]
groups = [dist.new_group(pair) for pair in pairs]
mine = next(i for i, pair in enumerate(pairs) if rank in pair)
other = model(10 + rank)
other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
second = gs.DataParallel(other, other_optimizer, process_group=groups[mine])
weights = train(second, other_optimizer)
assert equal_on(weights, groups[mine], pairs[mine])
assert not equal_on(weights, None, range(size))
assert gs.all_reduce(torch.ones(3), group=groups[mine]).tolist() == [len(pairs[mine])] * 3

for _ in range(3):  # closing and wrapping again uses new private groups
    second.close()
    second = gs.DataParallel(other, other_optimizer, process_group=groups[mine])
    train(second, other_optimizer, steps=1)
wrapped.close()
second.close()
gs.shutdown()
if rank == 0:
    print("all claims hold")
"""


@pytest.mark.parametrize("close", [True, False], ids=["closed", "left-open"])
def test_models_on_default_group_and_subgroups_train_side_by_side(tmp_path, close):
    job = JOB if close else JOB.replace("wrapped.close()\nsecond.close()\ngs.shutdown()\n", "")
    assert "all claims hold" in run_job(job, 3, tmp_path)


def test_import_costs_little_beside_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import gossamer; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True
    )
    loaded = done.stdout.split()
    assert not [name for name in loaded if name.split(".")[0] in ("rich", "matplotlib", "mpi4py")]
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch.distributed.tensor"))]
