"""Gossamer over NCCL, with two ranks on one GPU: only that it works. Run by `make gpu-check`.

NCCL refuses ranks of one host that share a GPU. So each rank says that it is a host of its own, and NCCL connects the
two by sockets on the loopback device. No figure from this would mean anything.
"""

import pytest

from gossamer.algorithms import ALGORITHMS
from tests.support.gpu import needs_gpu
from tests.support.ranks import run_job

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]

JOB = """
import os
from datetime import timedelta

rank = int(os.environ["RANK"])
os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer as gs
from gossamer import comm as comms
from gossamer.algorithms import ALGORITHMS
from tests.algorithms.test_contract import build as settings_of, optimizer_of
from tests.support.ranks import say

SIZES = {"bucket_bytes": 20000, "first_bucket_bytes": 2000}

torch.cuda.set_device(0)
device = torch.device("cuda:0")
dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
gs.init()

def sample(seed, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))

def same_on_both(x):
    both = gs.all_gather(x[None])
    return torch.equal(both[0], both[1])

def facts_of_sums():
    comm, control = comms.private(None, device)
    for codec in [None, gs.Int8(), gs.Int4(), gs.OneBit(), gs.MinMaxUInt8(), gs.BF16()]:
        for numel in [1, 257, 200_003]:
            x, there = sample(numel, numel), sample(numel, numel).to(device)
            options = {"codec": codec, "deterministic": True, "op": "mean"}
            gs.all_reduce(x, group=control, **options)
            gs.all_reduce(there, group=comm, **options)
            yield torch.equal(there.cpu(), x)
    x = torch.full((300_001,), rank + 1.0, device=device)
    gs.all_reduce(x, group=comm)
    yield bool((x == 3).all())

def build():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 4)]
    return nn.Sequential(*layers).to(device)

def weights(network):
    return torch.cat([param.detach().flatten() for param in network.parameters()])

def steps(model, optimizer, alone=False):
    for step in range(10):
        both = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        model(both.flatten(0, 1) if alone else both[rank]).square().mean().backward()
        optimizer.step()

def train(algorithm):
    network = build()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model = network
    if algorithm is not None:
        model = gs.DataParallel(network, optimizer, algorithm=algorithm, **SIZES)
    steps(model, optimizer, alone=algorithm is None)
    return weights(network)  # the model ends here, right after a step

def facts_of_training():
    start, alone = weights(build()), train(None)
    for algorithm, bound in [
        (gs.GradientAllReduce(), 1e-4),
        (gs.GradientAllReduce(deterministic=True), 1e-4),
        (gs.ByteGrad(), 0.05),
        (gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())), 0.2),
    ]:
        mine = train(algorithm)
        yield same_on_both(mine)
        yield bool((mine - alone).norm() < bound * (alone - start).norm())

def facts_of_algorithms():
    for name in sorted(ALGORITHMS):
        network = build()
        start, optimizer = weights(network), optimizer_of(name, network.parameters())
        model = gs.DataParallel(network, optimizer, algorithm=settings_of(name), **SIZES)
        steps(model, optimizer)
        model.consensus()
        model.close()
        yield same_on_both(weights(network)) and not torch.equal(weights(network), start)

def facts_of_fsdp():
    mesh = init_device_mesh(device.type, (2,))
    start, alone = weights(build()), train(None)
    for coded in (None, gs.BF16(), gs.Delta(gs.Int4())):
        model = build()
        for layer in (*model[::2], model):
            fully_shard(layer, mesh=mesh)
        gs.fsdp.compress(model, gs.Int8(), weights=coded)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        mine = torch.cat([param.full_tensor().detach().flatten() for param in model.parameters()])
        yield bool((mine - alone).norm() < 0.05 * (alone - start).norm())

for name in ("sums", "training", "algorithms", "fsdp"):
    say(name, rank, *globals()["facts_of_" + name]())
gs.shutdown()
dist.destroy_process_group()
"""
COUNTS = {"sums": 19, "training": 8, "algorithms": len(ALGORITHMS), "fsdp": 3}


def test_two_ranks_sum_and_train_over_nccl(tmp_path):
    lines = [line.split() for line in run_job(JOB, 2, tmp_path).splitlines()]
    facts = {(line[0], line[1]): line[2:] for line in lines if line and line[0] in COUNTS}
    assert {key: values for key, values in facts.items() if set(values) != {"True"}} == {}
    assert {key: len(values) for key, values in facts.items()} == {
        (name, str(rank)): count for name, count in COUNTS.items() for rank in (0, 1)
    }
