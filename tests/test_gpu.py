"""What only a GPU can show: equal bytes on CPU and CUDA, and collectives on CUDA tensors. Run by `make gpu-check`.

Training on a GPU is in test_devices.py, with processes: autograd has one thread for each device.

Several ranks share one GPU here, so their group is Gloo with CUDA tensors; NCCL refuses duplicate devices.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from codec_cases import CODECS, DTYPES
from gossamer import _C, _ops, comm
from models import relative_error
from ranks import keep_alive, run_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _C.with_cuda),
        reason="needs a GPU and a build of gossamer with CUDA",
    ),
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
            _ops.reduce_encode(
                w, _ops.KINDS[codec.kind], codec.block, dtype=dtype, row_numel=numel, scale=1 / 3, key=5
            )
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
    def body(device_comm, _control):
        x = sample(1, 100_003, torch.float32)[0] * (device_comm.rank + 1)
        return gs.all_reduce(x.cuda(), codec=codec, op="mean", group=device_comm).cpu()

    reference = sample(1, 100_003, torch.float32)[0] * 1.5
    first, second = run_cuda_ranks(2, body)
    assert torch.equal(first, second)
    assert relative_error(first.double(), reference.double()) < 0.02
