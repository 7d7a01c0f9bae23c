"""SyncBatchNorm against nn.BatchNorm on the joined batch, in the job of conftest.py."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.contrib import sync_batchnorm
from gossamer.bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm
from tests.bagua.groups import groups, refused

pytestmark = pytest.mark.usefixtures("job")

FEATURES = 5
SHAPES = {  # of what follows [N, C], and the plain module
    (): nn.BatchNorm1d,
    (7,): nn.BatchNorm1d,
    (3, 4): nn.BatchNorm2d,
    (2, 3, 2): nn.BatchNorm3d,
}
STEPS = 3


def batch(rank: int, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A batch of 3, 4, 5, ... rows by rank; rank 1 has no rows in the last step."""
    rows = 0 if (rank, step) == (1, STEPS - 1) else 3 + rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(rows, FEATURES, *shape, generator=generator, dtype=torch.float64) * 3 + 7 * rank).to(
        dtype
    )


def upstream(x: Tensor) -> Tensor:
    return torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape).sin()


def settle(plain: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(torch.rand(FEATURES, generator=generator, dtype=torch.float64) + 0.5)


def test_training_is_that_of_the_joined_batch() -> None:
    settings = (
        {},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": 0.5, "eps": 0.1},
    )
    for case, group in groups():
        if dist.get_rank() not in group.ranks:
            continue
        for shape, kind in SHAPES.items():
            if kind is nn.BatchNorm2d:
                for options in settings:
                    compare(group, kind, shape, options, torch.float64, 1e-10, case)
                compare(group, kind, shape, {}, torch.float32, 2e-5, case)
            elif "gossamer" in case:
                compare(group, kind, shape, {}, torch.float64, 1e-10, case)


def compare(group, kind, shape, options, dtype, tolerance, case) -> None:
    rank, size = group.get_global_communicator().rank(), group.get_global_communicator().nranks()
    plain = kind(FEATURES, dtype=dtype, **options)
    settle(plain)
    own = SyncBatchNorm(FEATURES, process_group=group, dtype=dtype, **options)
    own.load_state_dict(plain.state_dict())

    def close(got: Tensor, want: Tensor, what: str) -> None:
        message = f"{what} of {kind.__name__}({options}) {dtype} {shape} {case}"
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{message}: {text}"
        )

    for step in range(STEPS):
        parts = [batch(peer, step, shape, dtype) for peer in range(size)]
        whole = torch.cat(parts).requires_grad_()
        mine = parts[rank].clone().requires_grad_()
        plain_output, output = plain(whole), own(mine)
        weights = [upstream(part) for part in parts]
        (plain_output * torch.cat(weights)).sum().backward()
        (output * weights[rank]).sum().backward()
        rows = [len(part) for part in parts]
        close(output, plain_output.split(rows)[rank], "output")
        close(mine.grad, whole.grad.split(rows)[rank], "gradient")
        for (name, param), reference in zip(own.named_parameters(), plain.parameters(), strict=True):
            summed = param.grad.clone()
            bagua.allreduce_inplace(summed, comm=group.get_global_communicator())
            close(summed, reference.grad, f"gradient of {name}")
            param.grad = reference.grad = None
        for (name, buffer), reference in zip(own.named_buffers(), plain.buffers(), strict=True):
            close(buffer, reference, name)
    # Without running statistics a batch in eval mode is normalised by itself, as by the plain module.
    x = batch(rank, 0, shape, dtype)
    close(own.eval()(x), plain.eval()(x), "output in eval mode")


def test_two_collectives_a_step() -> None:
    calls = []
    spied = [(sync_batchnorm, name) for name in ("all_gather", "all_reduce")]
    spied += [(dist, name) for name in ("all_gather", "all_reduce", "broadcast", "all_gather_object")]
    originals = [(place, name, getattr(place, name)) for place, name in spied]
    try:
        for place, name, original in originals:
            setattr(place, name, lambda *a, _o=original, _n=name, **k: (calls.append(_n), _o(*a, **k))[1])
        own = SyncBatchNorm(FEATURES)
        own(torch.randn(4, FEATURES, requires_grad=True)).sum().backward()
        assert calls == ["all_gather", "all_reduce"], calls
        own(torch.randn(4, FEATURES)).sum().backward()  # the first layer: nothing upstream wants a gradient
        assert calls == ["all_gather", "all_reduce", "all_gather"], calls
        own.eval()
        own(torch.randn(4, FEATURES))
        assert len(calls) == 3
    finally:
        for place, name, original in originals:
            setattr(place, name, original)


def test_low_precision_and_channels_last_keep_their_format() -> None:
    own = SyncBatchNorm(FEATURES)
    x = torch.randn(2, FEATURES, 3, 3).to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    output = own(x)
    output.float().sum().backward()
    assert output.dtype == x.grad.dtype == torch.bfloat16
    assert own.weight.grad.dtype == torch.float32
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_refusals() -> None:
    own = SyncBatchNorm(FEATURES)
    refused(f"input must be [N, {FEATURES}, ...], got [3, 4]", lambda: own(torch.ones(3, 4)), gs.ConfigError)
    refused(f"input must be [N, {FEATURES}, ...], got [5]", lambda: own(torch.ones(5)), gs.ConfigError)
    # one value on all ranks together: every rank gets an error, and the group goes on
    x = torch.ones(int(dist.get_rank() == 0), FEATURES)
    refused("two values for a channel over all ranks, got 1", lambda: own(x), gs.ConfigError)
    own(torch.randn(2, FEATURES))
    outside = bagua.new_group([0])
    if dist.get_rank() != 0:
        own = SyncBatchNorm(FEATURES, process_group=outside)
        refused("needs a group that this rank is in", lambda: own(torch.ones(2, FEATURES)), gs.ConfigError)


def test_conversion_finds_every_place_and_keeps_what_is_there() -> None:
    norm = nn.BatchNorm1d(3, eps=0.5, momentum=None).eval()
    model = nn.ModuleDict(
        {"a": norm, "b": nn.Sequential(norm, nn.Linear(3, 3), nn.SyncBatchNorm(3)), "c": norm}
    )
    names, tensors = (
        list(model.state_dict()),
        [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
    )
    assert SyncBatchNorm.convert_sync_batchnorm(model, dist.group.WORLD) is model
    own = model["a"]
    assert own is model["b"][0] is model["c"]
    assert (type(own), type(model["b"][2])) == (SyncBatchNorm, SyncBatchNorm)
    assert (own.eps, own.momentum, own.training, own.process_group) == (0.5, None, False, dist.group.WORLD)
    assert list(model.state_dict()) == names
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == tensors
    assert SyncBatchNorm.convert_sync_batchnorm(own) is own
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(2, affine=False))) is SyncBatchNorm
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    refused(
        "a lazy BatchNorm has no size yet", lambda: SyncBatchNorm.convert_sync_batchnorm(lazy), gs.ConfigError
    )


def test_converted_model_trains_as_one_process() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 8),
            nn.BatchNorm1d(8),
        ).double()

    alone, shared = model(), model()
    optimizer = torch.optim.SGD(
        shared.parameters(), lr=0.05, momentum=0.9
    )  # before: parameters stay the same objects
    converted = SyncBatchNorm.convert_sync_batchnorm(shared)
    assert [type(layer) for layer in (converted[1], converted[5])] == [SyncBatchNorm] * 2
    reference = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    wrapped = gs.DataParallel(converted, optimizer)
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        data = torch.randn(3 * size, 2, 4, 4, generator=generator, dtype=torch.float64)
        for trained, part, steps in (
            (alone, data, reference),
            (wrapped, data[3 * rank : 3 * rank + 3], optimizer),
        ):
            steps.zero_grad()
            trained(part).cos().mean().backward()
            steps.step()
    for (name, got), want in zip(converted.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
    wrapped.close()
