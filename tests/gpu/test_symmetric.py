"""Symmetric buckets and CUDA graphs with processes that share one GPU: the bits of Gloo and of the CPU.

Run by `make gpu-check`. Torch lets several ranks of symmetric memory be on one device where
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1.
"""

import pytest

from tests.support.gpu import needs_gpu
from tests.support.ranks import run_job

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

BEGIN = """
import sys
import torch
from torch import nn
import gossamer as gs
from gossamer import _C
from gossamer import comm as comms

torch.cuda.set_device(0)
gs.init(backend="gloo", timeout_s=60)
device = torch.device("cuda:0")

def sample(seed, numel, dtype=torch.float32):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + gs.rank()), dtype=torch.float64)
    x[5::97] *= 1e-6
    return x.to(dtype)

def same_bits(x, y):
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))

def build():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 4)]
    return nn.Sequential(*layers).to(device)

def weights(network):
    return torch.cat([param.detach().flatten().cpu() for param in network.parameters()])

def same_on_all(tensor):
    every = gs.all_gather(tensor[None])
    return all(torch.equal(every[0], other) for other in every)

def report(*facts):
    facts = torch.tensor(facts, dtype=torch.int64)
    every = gs.all_gather(facts[None])
    if gs.rank() == 0:
        print(int(every.min()))
    gs.shutdown()
"""

SUMS = """
comm, control = comms.private(None, device)
own = comms.symmetric(comm, control)
codecs = [None, gs.Int8(), gs.Int8(64, stochastic=True), gs.Int4(), gs.OneBit(), gs.MinMaxUInt8(), gs.BF16(), gs.FP16()]
dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
facts = []
for dtype in dtypes:
    memory = own.allocate(2_500_003 * dtype.itemsize).view(dtype)
    for numel in [0, 1, 7, 255, 256, 257, 1021, 200_003, 2_500_003]:
        for codec in codecs:
            x, expected = memory[:numel].copy_(sample(numel, numel, dtype)), sample(numel, numel, dtype)
            staged = expected.cuda()
            gs.all_reduce(x, codec=codec, deterministic=True, op="mean", nonce=numel, group=own)
            gs.all_reduce(staged, codec=codec, deterministic=True, op="mean", nonce=numel, group=comm)
            gs.all_reduce(expected, codec=codec, deterministic=True, op="mean", nonce=numel, group=control)
            facts += [same_bits(x.cpu(), expected), same_bits(staged.cpu(), expected)]
            if codec is None:
                x.copy_(sample(numel, numel, dtype))
                _C.sum(own, x)
                plain = sample(numel, numel, dtype)
                gs.all_reduce(plain, deterministic=True, group=control)
                facts.append(same_bits(x.cpu(), plain))

# Work that is queued but has not run is waited for: by the device, since the host returns at once.
memory = own.allocate(4 << 20).view(torch.float32)
torch.cuda.synchronize()
for late in range(gs.size()):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if gs.rank() == late:
            torch.cuda._sleep(200_000_000)
        memory.fill_(gs.rank() + 1.0)
        _C.sum(own, memory)
        total = memory.clone()
    stream.synchronize()
    facts.append(bool((total == gs.size() * (gs.size() + 1) / 2).all()))

error = {own: torch.zeros(5003, device=device), comm: torch.zeros(5003, device=device)}
for step in range(3):
    results = []
    for group, kept in error.items():
        x = sample(step, 5003).cuda()
        gs.all_reduce(x, codec=gs.ErrorFeedback(gs.Int4()), op="mean", error=kept, group=group)
        results.append(torch.cat([x, kept]))
    facts.append(same_bits(*results))
report(*facts)
"""

TRAINING = """
def train(algorithm, group):
    network = build()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    options = {"bucket_bytes": 20000, "first_bucket_bytes": 2000, "process_group": group}
    model = gs.DataParallel(network, optimizer, algorithm=algorithm, **options)
    for step in range(20):
        optimizer.zero_grad()
        model(sample(step, 64).view(4, 16).to(device)).square().mean().backward()
        optimizer.step()
    direct = [_C.sum_in_place(model.engine._comm, bucket.flat("grad"), 1.0) for bucket in model.engine.buckets]
    torch.cuda.synchronize()
    model.close()
    return weights(network), all(direct)

facts = []
for algorithm in [
    lambda: gs.GradientAllReduce(deterministic=True),
    lambda: gs.ByteGrad(),
    lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.OneBit())),
]:
    (mine, direct), (staged, _) = train(algorithm(), gs.Symmetric()), train(algorithm(), None)
    facts += [direct, torch.equal(mine, staged), same_on_all(mine)]
mine, direct = train("gradient_allreduce", gs.Symmetric())
facts += [direct, same_on_all(mine)]
report(*facts)
"""

GRAPHS = """
side = torch.cuda.Stream()

def refused(call, words):
    try:
        call()
    except gs.ConfigError as error:
        return words in str(error)
    return False

class Training:
    def __init__(self, algorithm, group, *, stream=side, warm_up=3):
        self.stream = stream
        with torch.cuda.stream(stream):
            self.network = build()
            self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
            options = {"bucket_bytes": 20000, "first_bucket_bytes": 2000, "process_group": group}
            self.model = gs.DataParallel(self.network, self.optimizer, algorithm=algorithm, **options)
            self.batch = torch.zeros(4, 16, device=device)
            for index in range(warm_up):
                self.feed(index)
                self.step()
        torch.cuda.synchronize()

    def feed(self, index):
        self.batch.copy_(sample(index, 64).view(4, 16))

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def capture(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self.step()
        return graph

    def run(self, step):
        with torch.cuda.stream(self.stream):
            for index in range(3, 10):
                self.feed(index)
                step()
        torch.cuda.synchronize()
        self.model.close()
        return weights(self.network)

facts = []
for algorithm in [
    lambda: gs.GradientAllReduce(),
    lambda: gs.GradientAllReduce(deterministic=True),
    lambda: gs.ByteGrad(),
    lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int8())),
]:
    eager, graphed = Training(algorithm(), gs.Symmetric()), Training(algorithm(), gs.Symmetric())
    start = weights(graphed.network)
    graph = graphed.capture()
    facts.append(torch.equal(weights(graphed.network), start))  # a capture runs nothing
    expected, mine = eager.run(eager.step), graphed.run(graph.replay)
    # Matrix products may take another algorithm in a graph; ranks that did not exchange gradients would be far off.
    facts += [bool((mine - expected).norm() < 0.02 * (expected - start).norm()), same_on_all(mine)]
    del graph

staged = Training("gradient_allreduce", None)
facts.append(refused(staged.capture, "uses 'gloo'"))
facts.append(bool(staged.run(staged.step).isfinite().all()))  # it trains on

cold = Training("gradient_allreduce", gs.Symmetric(), warm_up=0)
facts.append(refused(cold.capture, "first one makes the buckets anew"))
cold.model.close()

default = Training("gradient_allreduce", gs.Symmetric(), stream=torch.cuda.default_stream())
facts.append(refused(default.capture, "wrapped on the default stream"))
default.model.close()

noisy = Training(gs.ByteGrad(codec=gs.Int8(stochastic=True)), gs.Symmetric())
facts.append(refused(noisy.capture, "same random numbers"))
noisy.model.close()

adam = gs.optim.Adam([nn.Parameter(torch.zeros(3, device=device))])
adam.param_groups[0]["params"][0].grad = torch.ones(3, device=device)
adam.step()
torch.cuda.synchronize()
def capture_adam():
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        adam.step()
facts.append(refused(capture_adam, "capture"))
report(*facts)
"""

OVERLAP = """
comm, control = comms.private(None, device)
try:
    comms.symmetric(comm, control)
    fact = False
except gs.ConfigError as error:
    fact = "ranks 0 and 1 share GPU-" in str(error)
report(fact)
"""


@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_symmetric_memory_have_the_bits_of_gloo_and_of_the_cpu(size, tmp_path, monkeypatch):
    monkeypatch.setenv(OVERLAPPING, "1")
    assert run_job(BEGIN + SUMS, size, tmp_path).split()[-1] == "1"


def test_models_with_symmetric_buckets_train_to_the_bits_of_gloo(tmp_path, monkeypatch):
    monkeypatch.setenv(OVERLAPPING, "1")
    assert run_job(BEGIN + TRAINING, 2, tmp_path).split()[-1] == "1"


def test_a_captured_step_replays_as_the_eager_one_goes_and_others_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(OVERLAPPING, "1")
    assert run_job(BEGIN + GRAPHS, 2, tmp_path).split()[-1] == "1"


def test_ranks_on_one_gpu_are_refused_on_all_of_them_unless_torch_is_told_to_allow_it(tmp_path, monkeypatch):
    monkeypatch.delenv(OVERLAPPING, raising=False)
    assert run_job(BEGIN + OVERLAP, 2, tmp_path).split()[-1] == "1"
