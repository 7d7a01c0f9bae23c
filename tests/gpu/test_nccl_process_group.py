"""The backend "gossamer" with CUDA tensors, with two ranks on one GPU: only that it works. Run by `make gpu-check`.

How NCCL is made to take two ranks on one GPU: see test_nccl.py.
"""

import pytest

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
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from tests.support.ranks import say

torch.cuda.set_device(0)
cuda = torch.device("cuda:0")
NAME = "cpu:gossamer,cuda:gossamer"
options = gs.Options(gs.Int8(), gather_codec=gs.BF16(), min_bytes=0)
dist.init_process_group(NAME, timeout=timedelta(seconds=60), pg_options=options)
plain = dist.new_group(backend=NAME)
OPS = dist.ReduceOp

def sample(seed, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)

def same_on_both(x):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x, group=plain)
    return torch.equal(parts[0], parts[1])

def facts_of_bits():
    # Those of the same call between CPU tensors.
    backend = dist.group.WORLD._get_backend(cuda)
    before = backend.comm.bytes_sent  # in the making of groups
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for numel in (2, 258, 200_004):
            for op in (OPS.SUM, OPS.AVG):
                x = sample(numel, numel, dtype)
                there = x.to(cuda)
                dist.all_reduce(x, op)
                dist.all_reduce(there, op)
                yield torch.equal(there.cpu(), x)
                x = sample(numel, numel, dtype)
                out, out_there = x.new_empty(numel // 2), x.new_empty(numel // 2).to(cuda)
                dist.reduce_scatter_tensor(out, x, op)
                dist.reduce_scatter_tensor(out_there, x.to(cuda), op)
                yield torch.equal(out_there.cpu(), out)
            whole = x.new_empty(2 * numel)
            whole_there = whole.to(cuda)
            dist.all_gather_into_tensor(whole, x)
            dist.all_gather_into_tensor(whole_there, x.to(cuda))
            yield torch.equal(whole_there.cpu(), whole)
    yield backend.device_comm.bytes_sent == backend.comm.bytes_sent - before > 0

def facts_of_streams():
    exact = torch.full((1 << 22,), rank + 1.0, device=cuda)
    for _ in range(20):
        x = exact.clone()
        torch.cuda._sleep(2_000_000)  # late on the current stream
        x.add_(1)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        x.add_(1)
        yield bool((x - 6).abs().max() < 0.1)
        out = torch.empty(1 << 21, device=cuda)
        whole = exact.clone()
        work = dist.reduce_scatter_tensor(out, whole, async_op=True)
        del whole
        torch.full((1 << 22,), float("nan"), device=cuda)  # may get its memory, once the group has read it
        work.wait()
        yield bool((out - 3).abs().max() < 0.1)
    x = exact.clone()
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0].mul(2))
    yield bool((future.wait() - 6).abs().max() < 0.1)

def facts_of_exact_operations():
    for group in (None, plain):
        x = torch.arange(1000, device=cuda) * (rank + 1)
        dist.all_reduce(x, group=group)
        yield torch.equal(x, torch.arange(1000, device=cuda) * 3)
        x = sample(1, 1000).to(cuda)
        both = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(both, x, group=plain)
        for op, want in ((OPS.MAX, torch.maximum(*both)), (OPS.PRODUCT, both[0] * both[1])):
            y = x.clone()
            dist.all_reduce(y, op, group=group)
            yield torch.equal(y, want)
        y = x.clone()
        dist.broadcast(y, 1, group=group)
        yield torch.equal(y, both[1])
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        yield torch.equal(y, torch.cat([b.chunk(2)[rank] for b in both]))
        for device in (cuda, torch.device("cpu")):
            mine, theirs = x.to(device), torch.empty(1000, device=device)
            ends = [dist.P2POp(dist.isend, mine, 1 - rank, group), dist.P2POp(dist.irecv, theirs, 1 - rank, group)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
            yield torch.equal(theirs.cpu(), both[1 - rank].cpu())
        dist.barrier(group=group, device_ids=[0])
        objects = [None, None]
        dist.all_gather_object(objects, rank, group=group)
        yield objects == [0, 1]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as several:
        tensors = [torch.full((1000 * (i + 1),), rank + 1.0, device=cuda) for i in range(3)]
        for x in tensors:
            dist.all_reduce(x)
    several.wait()
    yield all(bool((x - 3).abs().max() < 0.1) for x in tensors)
    y = torch.full((1000,), rank + 1.0, device=cuda)
    gs.all_reduce(y)  # a direct call chooses its own codec: none
    yield bool((y == 3).all())

def facts_of_graphs():
    x = torch.ones(1000, device=cuda)
    torch.cuda.synchronize()
    graph, said = torch.cuda.CUDAGraph(), ""
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        try:
            dist.all_reduce(x)
        except gs.ConfigError as error:
            said = str(error)
    graph.replay()
    yield "a CUDA graph cannot hold an encoded operation" in said
    yield bool((y == 2).all())

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 4)).to(cuda)

def train(model, alone=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        both = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(step)).to(cuda)
        optimizer.zero_grad()
        model(both.flatten(0, 1) if alone else both[rank]).square().mean().backward()
        optimizer.step()
    parts = [getattr(param, "full_tensor", lambda param=param: param)() for param in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])

def facts_of_training():
    start = torch.cat([param.detach().flatten() for param in network().parameters()])
    alone = train(network(), alone=True)
    coded = (NAME, gs.Options(gs.Int8(), min_bytes=0))
    mesh = init_device_mesh(
        "cuda", (2, 1), mesh_dim_names=("hosts", "shards"), backend_override={"hosts": coded, "shards": (NAME, None)}
    )
    shards = init_device_mesh("cuda", (2,), mesh_dim_names=("sharded",), backend_override={"sharded": coded})
    for model in (
        DistributedDataParallel(network(), bucket_cap_mb=0.02),
        fully_shard(network(), mesh=mesh),
        fully_shard(network(), mesh=shards),
    ):
        mine = train(model)
        yield same_on_both(mine)
        yield bool((mine - alone).norm() < 0.05 * (alone - start).norm())

for name in ("bits", "streams", "exact_operations", "graphs", "training"):
    say(name, rank, *globals()["facts_of_" + name]())
dist.destroy_process_group()
"""
COUNTS = {"bits": 46, "streams": 41, "exact_operations": 18, "graphs": 2, "training": 6}


def test_two_ranks_of_a_process_group_with_codecs_work_with_cuda_tensors(tmp_path):
    lines = [line.split() for line in run_job(JOB, 2, tmp_path).splitlines()]
    facts = {(line[0], line[1]): line[2:] for line in lines if line and line[0] in COUNTS}
    wrong = {key: [i for i, value in enumerate(values) if value != "True"] for key, values in facts.items()}
    assert {key: places for key, places in wrong.items() if places} == {}
    assert {key: len(values) for key, values in facts.items()} == {
        (name, str(rank)): count for name, count in COUNTS.items() for rank in (0, 1)
    }
