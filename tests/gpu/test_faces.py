"""What users call, with CUDA tensors against the same with CPU tensors: algorithms, hooks, Horovod's and Bagua's faces.

Run by `make gpu-check`. Two ranks share the GPU, over Gloo.
"""

import pytest

from tests.support.gpu import needs_gpu
from tests.support.ranks import run_job

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]

# A case is a function of the device that returns tensors. What it returns on both devices must differ little, and its
# error, if it raises one, is what is shown.
BEGIN = """
import sys
import traceback
from functools import partial

import torch
from torch import nn

from tests.support.ranks import say

torch.backends.cuda.matmul.allow_tf32 = False
DEVICES = ("cpu", sys.argv[1])

def build(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 4)).to(device)

def batch_of(rank, step, device):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)

def train(model, optimizer, rank, device, steps=range(12)):
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(rank, step, device)).square().mean().backward()
        optimizer.step()

def weights(module):
    return torch.cat([param.detach().flatten().cpu() for param in module.parameters()])

def flat(result):
    tensors = result if isinstance(result, (list, tuple)) else [result]
    return torch.cat([x.detach().cpu().double().flatten() for x in tensors])

def show(rank, cases):
    for name, (case, bound) in cases.items():
        try:
            here, there = (flat(case(device)) for device in DEVICES)
            error = ((here - there).norm() / here.norm().clamp_min(1e-9)).item()
            said = "right" if here.shape == there.shape and error <= bound else f"wrong {error:.3g}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}, at {traceback.format_exc()[-500:]}".replace("\\n", "; ")
        say(rank, "|", name, "|", said)
"""

ALGORITHMS = """
import gossamer as gs
from gossamer.algorithms import ALGORITHMS
from tests.algorithms.test_contract import build as settings_of, optimizer_of, whole_state

gs.init(backend="gloo")
rank = gs.rank()
SIZES = {"bucket_bytes": 20000, "first_bucket_bytes": 2000}
outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

def trained(algorithm, optimizer, device, **options):
    network = build(device)
    optimizer = optimizer(network.parameters())
    model = gs.DataParallel(network, optimizer, algorithm=algorithm(), **SIZES, **options)
    train(model, optimizer, rank, device)
    model.consensus()
    mine = weights(network)
    model.close()
    both = gs.all_gather(mine[None])
    assert torch.equal(both[0], both[1]), "ranks differ"
    return mine

def resumed(name, device):
    def parts():
        network = build(device)
        optimizer = optimizer_of(name, network.parameters())
        return network, optimizer, gs.DataParallel(network, optimizer, algorithm=settings_of(name), **SIZES)

    network, optimizer, model = parts()
    train(model, optimizer, rank, device, range(5))
    saved = [model.state_dict(), whole_state(optimizer), model.algorithm_state_dict()]
    file = f"{sys.argv[2]}/{name}-{torch.device(device).type}-{rank}.pt"
    torch.save(saved, file)
    train(model, optimizer, rank, device, range(5, 11))
    whole = weights(network)
    model.close()
    network, optimizer, model = parts()
    saved = torch.load(file, map_location=device, weights_only=False)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    model.load_algorithm_state_dict(saved[2])
    train(model, optimizer, rank, device, range(5, 11))
    again = weights(network)
    model.close()
    assert ((again - whole).norm() / whole.norm()) < 1e-5, "a run that goes on from a file differs"
    return again

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=1e-3)
EXACT, CODED = 1e-5, 0.1
cases = {f"resume {name}": (partial(resumed, name), CODED) for name in sorted(set(ALGORITHMS) - {"async"})}
VARIANTS = {
    "DiLoCo": (lambda: gs.LocalSGD(3, outer), EXACT),
    "DiLoCo, 4 bits": (lambda: gs.LocalSGD(3, outer, codec=gs.ErrorFeedback(gs.Int4())), CODED),
    "streaming": (lambda: gs.LocalSGD(4, outer, fragments=2, delay=1, merge=0.5), EXACT),
    "SparseLoCo": (lambda: gs.LocalSGD(3, codec=gs.ChunkTopK(), error_decay=0.95), CODED),
    "NoLoCo": (lambda: gs.LocalSGD(3, outer, topology="random_pairs"), EXACT),
    "by seconds": (lambda: gs.LocalSGD(period_s=60), EXACT),
    "Int4 with feedback": (lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())), CODED),
    "OneBit with feedback": (lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.OneBit())), CODED),
    "TopK with feedback": (lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.TopK(0.2))), CODED),
    "ChunkTopK with feedback": (lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.ChunkTopK())), CODED),
    "Adaptive": (lambda: gs.GradientAllReduce(codec=gs.Adaptive(gs.Int8(), {"0.*": None, "2.*": gs.Int4()})), CODED),
    "Sharded, 8 bits": (lambda: gs.Sharded(codec=gs.Int8()), CODED),
    "Sharded, weights too": (lambda: gs.Sharded(gs.Int8(), gather_codec=gs.Int8()), CODED),
}
for name, (algorithm, bound) in VARIANTS.items():
    optimizer = partial(gs.ShardedOptimizer, torch.optim.AdamW, lr=1e-3) if "Sharded" in name else sgd
    cases[name] = partial(trained, algorithm, optimizer), bound
for kind in (sgd, adamw, partial(gs.optim.AdamW, lr=1e-3)):
    cases[f"exact {kind.func.__module__} {kind.func.__name__}"] = partial(trained, gs.GradientAllReduce, kind), EXACT

def clipped(device):
    network = build(device)
    optimizer = sgd(network.parameters())
    model = gs.DataParallel(network, optimizer, algorithm="bytegrad", **SIZES)
    for step in range(6):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch_of(rank, step, device)).square().mean().backward()
        model(batch_of(rank, step + 50, device)).square().mean().backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
    model.close()
    return weights(network)

cases["accumulated and clipped"] = clipped, CODED

def uneven(device):
    network = build(device)
    optimizer = sgd(network.parameters())
    model = gs.DataParallel(network, optimizer, **SIZES)
    with model.join():
        train(model, optimizer, rank, device, range(3 + 2 * rank))
    model.close()
    return weights(network)

cases["join"] = uneven, EXACT

def direct(codec, device):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(device)
    parts = gs.all_gather(x[None], codec=codec), gs.reduce_scatter(x, codec=codec)
    return [gs.all_reduce(x.clone(), codec=codec), *parts]

for codec in (None, gs.Int8(), gs.Int4(stochastic=True), gs.OneBit(), gs.BF16(), gs.TopK(0.1), gs.ChunkTopK()):
    cases[f"direct {codec}"] = partial(direct, codec), 1e-6

def hooked(hook, device, **options):
    from torch.nn.parallel import DistributedDataParallel

    network = build(device)
    model = DistributedDataParallel(network, bucket_cap_mb=0.02)
    gs.hooks.register(model, gs.hooks.State(model, **options), getattr(gs.hooks, hook))
    train(model, sgd(network.parameters()), rank, device, range(6))
    return weights(network)

for hook in ("bytegrad", "int8", "int4", "onebit", "deterministic", "bf16", "fp16", "powersgd"):
    cases[f"hook {hook}"] = partial(hooked, hook), CODED
cases["hook compress"] = partial(hooked, "compress", codec=gs.ErrorFeedback(gs.TopK(0.2))), CODED

def stock_face(device):
    network = build(device)
    optimizer = sgd(network.parameters())
    train(gs.DistributedDataParallel(network), optimizer, rank, device)
    return weights(network)

cases["gs.DistributedDataParallel"] = stock_face, EXACT
show(rank, cases)
gs.shutdown()
"""

HOROVOD = """
import gossamer as gs
import gossamer.horovod.torch as hvd

gs.init(backend="gloo")
hvd.init()
rank = hvd.rank()

def operations(device):
    x = torch.randn(600, generator=torch.Generator().manual_seed(rank)).to(device)
    return [
        hvd.allreduce(x, name="a"),
        hvd.allreduce(x, op=hvd.Sum, name="b", compression=hvd.Compression.fp16),
        hvd.allreduce(x, op=hvd.Adasum, name="c"),
        hvd.allreduce(x, op=hvd.Max, name="d"),
        *hvd.grouped_allreduce([x, x[:7] * 2], name="e"),
        hvd.allgather(x[: 10 + rank], name="f"),
        hvd.allgather(x[: 5 * rank], name="no rows on rank 0"),
        hvd.alltoall(x[: 6 * rank], splits=torch.full((2,), 3 * rank), name="nothing from rank 0")[0],
        hvd.sparse_allreduce_async(x[: 6 * rank].view(-1, 3).to_sparse(1), "no row of rank 0", hvd.Sum)().to_dense(),
        hvd.broadcast(x, 1, name="g"),
        hvd.alltoall(x, name="h"),
        hvd.reducescatter(x, name="i"),
        hvd.synchronize(hvd.allreduce_async_(x.clone(), name="j")),
    ]

def trained(device, **options):
    network = build(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters(), **options)
    train(network, optimizer, rank, device)
    return weights(network)

def normalised(device):
    layer = hvd.SyncBatchNorm(16).to(device)
    x = batch_of(rank, 3, device).requires_grad_()
    y = layer(x)
    y.square().mean().backward()
    return [y, x.grad, layer.running_mean]

show(rank, {
    "hvd operations": (operations, 1e-3),
    "hvd optimizer": (trained, 1e-5),
    "hvd optimizer fp16": (partial(trained, compression=hvd.Compression.fp16), 0.01),
    "hvd optimizer adasum": (partial(trained, op=hvd.Adasum), 1e-3),
    "hvd optimizer, groups": (partial(trained, num_groups=2), 1e-5),
    "hvd SyncBatchNorm": (normalised, 1e-4),
})
hvd.shutdown()
"""

BAGUA = """
import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.algorithms import Algorithm
from gossamer.bagua.torch_api.algorithms.q_adam import QAdamOptimizer

gs.init(backend="gloo")
bagua.init_process_group()
rank = bagua.get_rank()

def trained(name, device):
    network = build(device)
    kind = QAdamOptimizer if name == "qadam" else partial(torch.optim.SGD, lr=0.1)
    optimizer = kind(network.parameters())
    settings = {"q_adam_optimizer": optimizer} if name == "qadam" else {}
    model = bagua.with_bagua(network, [optimizer], Algorithm.init(name, **settings))
    train(model, optimizer, rank, device)
    return weights(network)

def operations(device):
    x = torch.randn(600, generator=torch.Generator().manual_seed(rank)).to(device)
    sums, every, part = torch.empty_like(x), x.new_empty(1200), x.new_empty(300)
    bagua.allreduce(x, sums)
    bagua.allgather(x, every)
    bagua.reduce_scatter(x, part)
    bagua.broadcast(x, src=1)
    return [sums, every, part, x]

NAMES = ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam")
show(rank, {"bagua operations": (operations, 1e-6)} | {
    f"bagua {name}": (partial(trained, name), 0.1) for name in NAMES
})
"""


@pytest.mark.parametrize(
    ("job", "cases"), [(ALGORITHMS, 45), (HOROVOD, 6), (BAGUA, 6)], ids=["algorithms", "horovod", "bagua"]
)
def test_what_users_call_gives_on_a_gpu_what_it_gives_on_a_cpu(job, cases, tmp_path):
    said = run_job(BEGIN + job, 2, tmp_path, "cuda:0", str(tmp_path)).splitlines()
    lines = [line for line in said if line.startswith(("0 | ", "1 | "))]
    assert [line for line in lines if not line.endswith("| right")] == []
    assert len(lines) == 2 * cases
