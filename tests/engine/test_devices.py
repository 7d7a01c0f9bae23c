"""Training on each kind of device with two processes equals one process, also tuned and with uneven inputs.

On a GPU both share it, over Gloo.
"""

import pytest

from tests.support.forks import fork_job
from tests.support.gpu import needs_gpu
from tests.support.ranks import run_job

JOB = """
import sys
import torch
from torch import nn
import gossamer as gs

device, *cases = sys.argv[1:]
def algorithm():
    return gs.GradientAllReduce(deterministic=True) if name == "deterministic" else name

SIZES = {"bucket_bytes": 20000, "first_bucket_bytes": 2000}
gs.init(backend="gloo")

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 4)).to(device)

def weights(model):
    return torch.cat([param.detach().flatten().cpu() for param in model.parameters()])

def train(network, rows):
    model = network
    optimizer = optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    if rows is not None:
        model = gs.DataParallel(network, optimizer, algorithm=algorithm(), **SIZES)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        batch = torch.randn(8, 16, generator=generator).to(device)
        optimizer.zero_grad()
        model(batch if rows is None else batch[rows]).square().mean().backward()
        optimizer.step()
    return weights(network)

def batch_of(rank, step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)

def tune(network):
    optimizer = optim.SGD(network.parameters(), lr=0.01)
    sizes = gs.Autotune(bucket_bytes=[5000, 200000])
    model = gs.DataParallel(network, optimizer, algorithm=algorithm(), autotune=sizes, **SIZES)
    steps = 0
    while model.tuned is None:
        optimizer.zero_grad()
        model(batch_of(gs.rank(), steps)).square().mean().backward()
        optimizer.step()
        steps += 1
        assert steps <= 200
    return weights(network)

def join(network):
    # This rank's batches are 2 or 4; momentum is part of the result.
    optimizer = optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model = gs.DataParallel(network, optimizer, algorithm=algorithm(), **SIZES)
    with model.join():
        for step in range(2 + 2 * gs.rank()):
            optimizer.zero_grad()
            model(batch_of(gs.rank(), step)).square().mean().backward()
            optimizer.step()
    momentum = [optimizer.state[param]["momentum_buffer"].flatten().cpu() for param in network.parameters()]
    return torch.cat([weights(network), *momentum])

def join_alone(network):
    optimizer = optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2) if step < 2 else [1]:
            (network(batch_of(rank, step)).square().mean() / 2).backward()
        optimizer.step()
    return weights(network)

def moved(result, reference):
    return ((result - reference).norm() / (reference - weights(build())).norm()).item()

def same_on_both(tensor):
    both = gs.all_gather(tensor[None])
    return torch.equal(both[0], both[1])

for case in cases:
    name, optimizers = case.split()
    optim = gs.optim if optimizers == "gs.optim" else torch.optim
    mine = train(build(), slice(4 * gs.rank(), 4 * gs.rank() + 4))
    error = moved(mine, train(build(), None))
    tuned, uneven = tune(build()), join(build())
    reference = join_alone(build())
    uneven_error = moved(uneven[:reference.numel()], reference)
    equal = same_on_both(mine) and same_on_both(tuned) and same_on_both(uneven)
    gs.shutdown()
    gs.init(backend="gloo")
    joined = gs.all_reduce(torch.ones(1)).item()
    if gs.rank() == 0:
        print("result", error, uneven_error, equal, joined)
gs.shutdown()
"""

ON_A_GPU = [
    pytest.mark.gpu,
    needs_gpu,
]


CASES = [
    "gradient_allreduce torch.optim",
    "gradient_allreduce gs.optim",
    "deterministic torch.optim",
    "bytegrad torch.optim",
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=ON_A_GPU)])
def test_two_processes_train_as_one_also_tuned_and_unevenly_and_can_join_again(device, tmp_path):
    job = fork_job if device == "cpu" else run_job
    printed = job(JOB, 2, tmp_path, device, *CASES).splitlines()
    lines = [line for line in printed if line.startswith("result ")]
    for case, line in zip(CASES, lines, strict=True):
        _, *errors, equal, joined = line.split()
        assert len(errors) == 2, case
        assert max(map(float, errors)) < (0.05 if "bytegrad" in case else 1e-4), case
        assert equal == "True", case
        assert joined == "2.0", case
