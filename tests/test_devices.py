"""Training on each kind of device with two processes equals one process. On a GPU both share it, over Gloo."""

import pytest
import torch

from gossamer import _C
from ranks import run_job

JOB = """
import sys
import torch
from torch import nn
import gossamer as gs

device, name, optimizers = sys.argv[1:]
algorithm = gs.GradientAllReduce(deterministic=True) if name == "deterministic" else name
optim = gs.optim if optimizers == "gs.optim" else torch.optim
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
        model = gs.DataParallel(network, optimizer, algorithm=algorithm, bucket_bytes=20000, first_bucket_bytes=2000)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        batch = torch.randn(8, 16, generator=generator).to(device)
        optimizer.zero_grad()
        model(batch if rows is None else batch[rows]).square().mean().backward()
        optimizer.step()
    return weights(network)

alone = train(build(), None)
mine = train(build(), slice(4 * gs.rank(), 4 * gs.rank() + 4))
error = ((mine - alone).norm() / (alone - weights(build())).norm()).item()
both = gs.all_gather(mine[None])
equal = torch.equal(both[0], both[1])
gs.shutdown()
gs.init(backend="gloo")
joined = gs.all_reduce(torch.ones(1)).item()
if gs.rank() == 0:
    print(error, equal, joined)
gs.shutdown()
"""

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _C.with_cuda),
        reason="needs a GPU and a build of gossamer with CUDA",
    ),
]


@pytest.mark.parametrize(
    ("algorithm", "optimizers"),
    [
        ("gradient_allreduce", "torch.optim"),
        ("gradient_allreduce", "gs.optim"),
        ("deterministic", "torch.optim"),
        ("bytegrad", "torch.optim"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=ON_A_GPU)])
def test_two_processes_train_as_one_and_can_join_again(device, algorithm, optimizers, tmp_path):
    error, equal, joined = run_job(JOB, 2, tmp_path, device, algorithm, optimizers).split()
    assert float(error) < (0.05 if algorithm == "bytegrad" else 1e-4)
    assert equal == "True"
    assert joined == "2.0"
