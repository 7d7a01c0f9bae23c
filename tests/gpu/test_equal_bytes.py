"""What only a GPU can show: equal bytes on CPU and CUDA, of codecs and optimizers, and collectives on CUDA tensors.

Run by `make gpu-check`.

Training on a GPU takes processes, here and in tests/engine/test_devices.py: autograd has one thread for each device.

Several ranks share one GPU here, so their group is Gloo with CUDA tensors; NCCL refuses duplicate devices.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from gossamer import _ops, comm
from tests.support.codec_cases import CODECS, DTYPES
from tests.support.gpu import needs_gpu
from tests.support.models import relative_error
from tests.support.optimizers import assert_same, give_gradients
from tests.support.ranks import keep_alive, run_job, run_threads

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]


def sample(rows, numel, dtype):
    x = torch.randn(rows, numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, ::7] *= 1e-4
    return x.to(dtype)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_and_cpu_give_equal_bytes(codec, dtype):
    for numel in [0, 1, 31, 255, 256, 257, 1021, 100_003]:
        x = sample(3, numel, dtype)
        wire = codec.encode(x)
        wire_cuda = codec.encode(x.cuda())
        assert torch.equal(wire_cuda.cpu(), wire)
        assert torch.equal(
            codec.decode(wire_cuda, torch.empty_like(x.cuda())).cpu(), codec.decode(wire, x.clone())
        )
        reduced = [
            _ops.reduce_encode(w, codec.kind, codec.block, dtype=dtype, row_numel=numel, scale=1 / 3, key=5)
            for w in (wire, wire_cuda)
        ]
        assert torch.equal(reduced[0], reduced[1].cpu())


def run_cuda_ranks(size, body):
    store = dist.HashStore()

    def rank_body(rank):
        backends = [
            dist.ProcessGroupGloo(dist.PrefixStore(kind, store), rank, size, timedelta(seconds=30))
            for kind in ("cpu", "cuda")
        ]
        keep_alive(backends)
        control = comm.from_backend(backends[0], store=store, name="cpu")
        return body(comm.from_backend(backends[1], device="cuda:0", store=store, name="cuda"), control)

    return run_threads(size, rank_body)


@pytest.mark.parametrize("codec", [None, *CODECS], ids=str)
def test_all_reduce_of_cuda_tensors_is_what_it_is_on_the_cpu(codec):
    def body(device_comm, control):
        x = sample(1, 100_003, torch.float32)[0] * (device_comm.rank + 1)
        on_device = gs.all_reduce(x.cuda(), codec=codec, op="mean", group=device_comm).cpu()
        return on_device, gs.all_reduce(x, codec=codec, op="mean", group=control)

    (first, reference), (second, _) = run_cuda_ranks(2, body)
    assert torch.equal(first, second)
    assert torch.equal(first, reference)


OPTIMIZERS = [
    ("SGD", {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("Adam", {"weight_decay": 0.1, "betas": (0.4, 0.99)}),
    ("AdamW", {"maximize": True}),
]


def stepped(name, options, sizes, dtype, device, *, in_a_row, steps=4):
    """Parameters and optimizer after some steps, all on the CPU. in_a_row: also where no vector load may start."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(sum(sizes), generator=generator, dtype=torch.float64).to(device, dtype).split(sizes)
    params = [torch.nn.Parameter(part if in_a_row else part.clone()) for part in parts]
    optimizer = getattr(gs.optim, name)(params, **options)
    for index in range(steps):
        give_gradients(params, index, holes=index == 2)
        optimizer.step()
    for state in optimizer.state.values():
        state.update({key: value.cpu() for key, value in state.items()})
    return [param.detach().cpu() for param in params], optimizer


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_a_row", [False, True], ids=["apart", "in a row"])
def test_optimizers_leave_equal_bits_on_cuda_and_cpu(name, options, dtype, in_a_row):
    sizes = [0, 1, 3, 4, 5, 255, 256, 257, 1021, 4095, 4096, 4097, 100_003]
    here = stepped(name, options, sizes, dtype, "cpu", in_a_row=in_a_row)
    there = stepped(name, options, sizes, dtype, "cuda", in_a_row=in_a_row)
    assert_same(there, here)


def test_more_parameters_than_one_launch_takes_are_all_stepped():
    sizes = [index % 7 * 3 + 1 for index in range(300)]
    here = stepped("Adam", {}, sizes, torch.float32, "cpu", in_a_row=False)
    there = stepped("Adam", {}, sizes, torch.float32, "cuda", in_a_row=False)
    assert_same(there, here)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_a_step_on_cuda_is_near_torchs(name, options):
    """torch's CUDA kernels divide and fuse differently from its CPU kernels, so bits are not compared."""
    start = torch.randn(10_007, generator=torch.Generator().manual_seed(0))
    ends = []
    for kind in (gs.optim, torch.optim):
        param = torch.nn.Parameter(start.cuda())
        optimizer = getattr(kind, name)([param], **options)
        for index in range(4):
            give_gradients([param], index, holes=False)
            optimizer.step()
        ends.append(param.detach() - start.cuda())
    assert relative_error(ends[0], ends[1]) < 1e-5


def test_a_step_on_another_stream_waits_for_that_stream_alone():
    param = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    optimizer = gs.optim.SGD([param], lr=1.0)
    stream = torch.cuda.Stream()
    param.grad = torch.zeros_like(param)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        param.grad.fill_(1.0)
        optimizer.step()
    stream.synchronize()
    assert torch.equal(param.detach().cpu(), torch.full((1 << 20,), -1.0))


@pytest.mark.parametrize("count", [3, 128, 129, 1024, 1500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flat_memory_has_equal_bits_on_cuda_and_cpu_however_many_tensors(dtype, count):
    sizes = [index * 37 % 300 for index in range(count - 2)] + [
        8192,
        20_001,
    ]  # most do not begin where a vector may
    flat = sample(1, sum(sizes), dtype)[0]
    parts = [part.clone() for part in flat.split(sizes)]
    there = [part.cuda() for part in parts]
    for scale in (1.0, 1 / 3):
        here, on_device = torch.full_like(flat, 7), torch.full_like(flat, 7).cuda()
        _ops.gather(parts, here, scale=scale)
        _ops.gather(there, on_device, scale=scale)
        assert torch.equal(on_device.cpu(), here)
        back, back_there = [torch.zeros_like(part) for part in parts], [torch.zeros_like(x) for x in there]
        _ops.scatter(back, here, scale=scale)
        _ops.scatter(back_there, on_device, scale=scale)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(back_there, back, strict=True))


STREAMS = """
import torch
from torch import nn

import gossamer as gs

class Late(torch.autograd.Function):
    # Its backward keeps the stream of its forward busy before there is a gradient.
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(20_000_000)
        return grad * 1

class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 300) for _ in range(4))
        self.streams = [torch.cuda.Stream() for _ in range(3)]

    def forward(self, x):
        main, outputs = torch.cuda.current_stream(), []
        for index, part in enumerate(self.parts):
            stream = self.streams[index % 3]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outputs.append(Late.apply(part(x)))
        for stream in self.streams:
            main.wait_stream(stream)
        return sum(outputs)

def build():
    torch.manual_seed(0)
    return Parts().cuda()

gs.init(backend="gloo")
mine, reference = build(), build()
model = gs.DataParallel(mine, bucket_bytes=100_000, first_bucket_bytes=1000)
worst = 0.0
for step in range(6):
    batches = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(step)).cuda()
    mine.zero_grad(set_to_none=step % 2 == 0)
    model(batches[gs.rank()]).square().mean().backward()
    got = [param.grad.clone() for param in mine.parameters()]
    reference.zero_grad()
    for batch in batches:
        reference(batch).square().mean().backward()
    for gradient, param in zip(got, reference.parameters(), strict=True):
        wanted = param.grad / 2
        worst = max(worst, ((gradient - wanted).norm() / wanted.norm()).item())
print(worst, flush=True)
gs.shutdown()
"""


def test_gradients_that_several_streams_produce_are_waited_for(tmp_path):
    worst = [float(line) for line in run_job(STREAMS, 2, tmp_path).split()]
    assert len(worst) == 2
    assert max(worst) < 1e-5
