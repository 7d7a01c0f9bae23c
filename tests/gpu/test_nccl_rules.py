"""What NCCL, streams and graphs want, with two ranks on one GPU. Run by `make gpu-check`, first after the build.

As in test_nccl.py each rank says that it is a host of its own.
"""

import pytest

from tests.support.gpu import needs_gpu
from tests.support.ranks import run_job

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]

COMMON = """
import os
import sys
import time
from datetime import timedelta

rank = int(os.environ["RANK"])
os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
# Hangs if launches have different orders on the two ranks.
os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # the watchdog would end a process whose peer is gone

import torch
import torch.distributed as dist
from torch import nn

import gossamer as gs
from gossamer import comm as comms
from gossamer.engine import Background
from tests.support.ranks import say

SIZES = {"bucket_bytes": 20000, "first_bucket_bytes": 2000}

torch.cuda.set_device(0)
device = torch.device("cuda:0")
dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
gs.init()

def build(norm=False):
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(64)] if norm else []
    layers = [nn.Linear(16, 64), *norms, nn.Tanh(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 4)]
    return nn.Sequential(*layers).to(device)

def weights(*networks):
    return torch.cat([param.detach().flatten() for network in networks for param in network.parameters()])

def batch(step, rows=8):
    return torch.randn(2, rows, 16, generator=torch.Generator().manual_seed(step)).to(device)

def near(mine, alone, start, bound=0.02):
    return bool((mine - alone).norm() < bound * (alone - start).norm())
"""

FACTS = """
def together(networks, models, inputs):
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9) for network in networks]
    models = [wrap(network, optimizer) for wrap, network, optimizer in zip(models, networks, optimizers)]
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(model(inputs(step)).square().mean() for model in models)
        loss.backward()
        dist.all_reduce(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
    return weights(*networks)

def facts_of_order():
    start = weights(build(True), build(True))
    plain = 2 * [lambda network, _: network]
    alone = together([build(True), build(True)], plain, lambda step: batch(step).flatten(0, 1))
    for algorithm in (gs.GradientAllReduce, gs.ByteGrad, lambda: gs.PowerSGD(start_step=100), lambda: gs.LocalSGD(1)):
        def wrap(network, optimizer):
            return gs.DataParallel(network, optimizer, algorithm=algorithm(), **SIZES)

        networks = [nn.SyncBatchNorm.convert_sync_batchnorm(build(True)) for _ in range(2)]
        yield near(together(networks, [wrap, wrap], lambda step: batch(step)[rank]), alone, start, 0.2)

def facts_of_background():
    own = Background(comms.private(None, device)[0])
    x = torch.full((100_000,), rank + 1.0, device=device)

    def slow():
        torch.cuda._sleep(2_000_000_000)  # about a second
        own.comm.all_reduce(x).wait()

    own.submit(lambda: own.comm.all_reduce(torch.ones(4, device=device)).wait(), "the connection")
    own.wait()
    first = own.submit(slow, "a slow sum")
    own.submit(slow, "another")
    yield own.busy()
    torch.ones(8, device=device).sum().item()  # the caller's stream is free
    yield own.busy()
    own.wait(first)
    yield own.busy()  # the other has not ended
    own.wait()
    yield not own.busy()
    yield bool((x == 6).all())
    own.close()

side = torch.cuda.Stream()

def wrapped(algorithm):
    with torch.cuda.stream(side):
        network = build()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        return network, optimizer, gs.DataParallel(network, optimizer, algorithm=algorithm, **SIZES)

def facts_of_graphs():
    for algorithm in (gs.GradientAllReduce, gs.ByteGrad):
        results = []
        for captures in (False, True):
            network, optimizer, model = wrapped(algorithm())
            static = torch.zeros(8, 16, device=device)

            def step():
                optimizer.zero_grad(set_to_none=True)
                model(static).square().mean().backward()
                optimizer.step()

            with torch.cuda.stream(side):
                for index in range(3):
                    static.copy_(batch(index)[rank])
                    step()
            torch.cuda.synchronize()
            start, graph = weights(network), torch.cuda.CUDAGraph()
            if captures:
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    step()
            with torch.cuda.stream(side):
                for index in range(3, 10):
                    static.copy_(batch(index)[rank])
                    graph.replay() if captures else step()
            torch.cuda.synchronize()
            results.append(weights(network))
            model.close()
            del graph
        yield near(*results, start)

def facts_of_compile():
    results = []
    for compiles in (False, True):
        network = build()
        start, optimizer = weights(network), torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        model = gs.DataParallel(network, optimizer, **SIZES)
        forward = torch.compile(model, mode="reduce-overhead") if compiles else model
        for step in range(12):
            optimizer.zero_grad()
            forward(batch(step, rows=(8, 4)[step % 2])[rank]).square().mean().backward()
            optimizer.step()
        results.append(weights(network))
        model.close()
    yield near(*results, start)

for name in ("order", "background", "graphs", "compile"):
    say(name, rank, *globals()["facts_of_" + name]())
gs.shutdown()
dist.destroy_process_group()
"""
COUNTS = {"order": 4, "background": 5, "graphs": 2, "compile": 1}

DEATH = """
from tests.support.models import Leave

network = build()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
model = gs.DataParallel(network, optimizer, **SIZES)
for step in range(5):
    begin = time.monotonic()
    optimizer.zero_grad()
    try:
        output = model(batch(step)[rank])
        (Leave.apply(output) if (step, rank) == (4, 1) else output).square().mean().backward()
        optimizer.step()
    except gs.CommError:
        copies = [value.cpu() for value in network.state_dict().values()]
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 30
        say("free", len(copies))
os._exit(0)
"""


def test_two_ranks_do_what_nccl_and_streams_want(tmp_path):
    lines = [line.split() for line in run_job(COMMON + FACTS, 2, tmp_path).splitlines()]
    facts = {(line[0], line[1]): line[2:] for line in lines if line and line[0] in COUNTS}
    assert {key: values for key, values in facts.items() if set(values) != {"True"}} == {}
    assert {key: len(values) for key, values in facts.items()} == {
        (name, str(rank)): count for name, count in COUNTS.items() for rank in (0, 1)
    }


def test_a_rank_whose_peer_has_ended_saves_its_weights(tmp_path):
    assert "free 6" in run_job(COMMON + DEATH, 2, tmp_path)
