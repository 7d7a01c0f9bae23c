# gs.optim: each step leaves the bits of torch's own optimizer of that name, for all sizes, dtypes, options and
# layouts. Two facts about torch on the CPU are excluded: without AVX2 or AVX-512 it rounds products before it adds
# them, and its square root (MKL's) is not always the nearest number, unlike that of fused=True. The surroundings of a
# step: test_surroundings.py.

import copy

import numpy as np
import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer import _C
from tests.support.optimizers import BF16, F32, F64, FP16, assert_same, build, give_gradients

multiplies_and_adds_at_once = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's kernels on this processor round products before they add",
)


@pytest.fixture
def exact_square_root(monkeypatch) -> None:
    """torch.optim's foreach and single-tensor Adam, with the nearest number for a square root."""

    def root(x):
        numbers = x.detach().numpy()
        return torch.from_numpy(np.sqrt(numbers, out=np.empty_like(numbers)))

    monkeypatch.setattr(torch.Tensor, "sqrt", root)
    monkeypatch.setattr(torch, "_foreach_sqrt", lambda tensors: [root(x) for x in tensors])


def as_torch(test):
    """A decorator for tests that compare bits with torch's."""
    return pytest.mark.usefixtures("exact_square_root")(multiplies_and_adds_at_once(test))


SGD, ADAM, ADAMW = ("SGD", "Adam", "AdamW")
OPTIONS = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (SGD, {"lr": torch.tensor(0.05), "momentum": 0.5}),
    (ADAM, {}),
    (ADAM, {"lr": 0.1, "betas": (0.4, 0.6), "eps": 1e-3, "weight_decay": 0.1}),
    (ADAM, {"betas": (0.0, 0.99), "maximize": True, "weight_decay": 0.01}),
    (ADAM, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (ADAM, {"lr": torch.tensor(0.01)}),
    (ADAMW, {}),
    (ADAMW, {"lr": 0.1, "weight_decay": 0.0}),
    (ADAMW, {"lr": 0.1, "weight_decay": 0.3, "maximize": True, "eps": 0.1}),
]
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1021, 32768, 100_003]
EACH = pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=lambda value: value if isinstance(value, str) else None
)


def pair(name, options, dtypes=(F32,), **torchs):
    """Ours and torch's, with equal parameters."""
    theirs = build(getattr(torch.optim, name), options | torchs, dtypes)
    return build(getattr(gs.optim, name), options, dtypes), theirs


def step(each, index, *, holes=True) -> None:
    for params, optimizer in each:
        give_gradients(params, index, holes=holes)
        optimizer.step()


@as_torch
@pytest.mark.parametrize("dtypes", [(F32,), (F64,), (F64, F32, F32)], ids=["float32", "float64", "both"])
@pytest.mark.parametrize("foreach", [False, True])
@EACH
def test_every_step_leaves_torchs_bits(name, options, foreach, dtypes) -> None:
    if isinstance(options.get("lr"), torch.Tensor) and name != SGD:
        pytest.skip(
            "torch computes with a tensor in float32, or with foreach not at all; ours as with fused=True"
        )
    ours, theirs = pair(name, options, dtypes, foreach=foreach)
    for index in range(12):
        step((ours, theirs), index)
        for group in theirs[1].param_groups:
            group["foreach"] = None
        assert_same(ours, theirs)
        for group in theirs[1].param_groups:
            group["foreach"] = foreach


@as_torch
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", [SGD, ADAM, ADAMW])
def test_every_size_has_torchs_bits(name, dtype) -> None:
    options = {"lr": 0.1, "momentum": 0.9} if name == SGD else {}
    for numel in SIZES:
        start = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=dtype)
        mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        ours = getattr(gs.optim, name)([mine], **options)
        theirs = getattr(torch.optim, name)([other], **options)
        for index in range(3):
            give_gradients([mine, other], index, holes=False)
            other.grad = mine.grad
            ours.step()
            theirs.step()
            assert torch.equal(mine, other), f"step {index} of {numel} elements"


@multiplies_and_adds_at_once
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@EACH
def test_every_step_leaves_the_bits_of_torchs_fused_one(name, options, dtype) -> None:
    """If the sizes fill torch's vectors: it rounds the remaining elements differently."""
    for numel in (16, 32, 48, 1024, 100_000):
        generator = torch.Generator().manual_seed(numel)
        start = torch.randn(numel, generator=generator, dtype=dtype)
        mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        ours = getattr(gs.optim, name)([mine], **options)
        theirs = getattr(torch.optim, name)([other], **options, fused=True)
        for _ in range(5):
            mine.grad = other.grad = torch.randn(numel, generator=generator, dtype=dtype)
            ours.step()
            theirs.step()
            assert torch.equal(mine, other)
            for key, value in theirs.state[other].items():
                assert torch.equal(ours.state[mine][key], value), key


# docs/optim.md states the observed values: 6 and 2.
@multiplies_and_adds_at_once
@pytest.mark.parametrize(("form", "bound"), [("foreach", 8), ("fused", 3)])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", [SGD, ADAM, ADAMW])
def test_from_equal_states_a_step_is_within_ulps_of_torchs(name, dtype, form, bound) -> None:
    options = {"lr": 0.1, "weight_decay": 0.01} | ({"momentum": 0.9} if name == SGD else {})
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        before = torch.randn(10_007, generator=generator, dtype=dtype)
        mine, other = nn.Parameter(before.clone()), nn.Parameter(before.clone())
        ours = getattr(gs.optim, name)([mine], **options)
        theirs = getattr(torch.optim, name)([other], **options, **{form: True})
        for _ in range(4):
            mine.grad = other.grad = torch.randn(10_007, generator=generator, dtype=dtype)
            ours.step()
            theirs.step()
            largest = torch.maximum(before.abs(), other.detach().abs())  # few bits are left after cancelling
            unit = 2.0 ** largest.log2().floor() * torch.finfo(dtype).eps
            assert ((mine - other).abs() <= bound * unit).all()
            with torch.no_grad():
                mine.copy_(other)
                before.copy_(other)
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))


@as_torch
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@EACH
def test_16_bit_parameters_are_stepped_in_float32_and_rounded(name, options, dtype) -> None:
    """They equal torch's steps of a float32 copy that is made anew for each step; the states are float32."""
    params, ours = build(getattr(gs.optim, name), options, (dtype,))
    copies, theirs = build(getattr(torch.optim, name), options)
    for index in range(8):
        give_gradients(params, index)
        for param, other in zip(params, copies, strict=True):
            other.data.copy_(param.detach())
            other.grad = None if param.grad is None else param.grad.float()
        ours.step()
        theirs.step()
        for param, other in zip(params, copies, strict=True):
            assert torch.equal(param, other.to(dtype))
    for mine, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        for key, value in other.items():
            assert torch.equal(mine[key], value), key
            assert mine[key].dtype == F32


@pytest.mark.parametrize("dtype", [F32, F64, BF16, FP16], ids=str)
@EACH
def test_every_instruction_set_leaves_equal_bits(name, options, dtype) -> None:
    chosen, ends = _C.instruction_set(), []
    try:
        for instruction_set in ("scalar", "neon", "avx2", "avx512"):
            if not _C.select_instruction_set(instruction_set):
                continue  # this processor lacks it
            ends.append(build(getattr(gs.optim, name), options, (dtype,)))
            for index in range(4):
                step(ends[-1:], index)
    finally:
        _C.select_instruction_set(chosen)
    for end in ends[1:]:
        assert_same(end, ends[0])


@pytest.mark.parametrize("name", [SGD, ADAM, ADAMW])
def test_bits_do_not_depend_on_the_number_of_threads(name) -> None:
    before, ends = torch.get_num_threads(), []
    start = torch.randn(300_007, generator=torch.Generator().manual_seed(0))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            params = [nn.Parameter(start[:200_003].clone()), nn.Parameter(start[200_003:].clone())]
            optimizer = getattr(gs.optim, name)(params, lr=0.1)
            for index in range(2):
                step([(params, optimizer)], index, holes=False)
            ends.append(params)
    finally:
        torch.set_num_threads(before)
    for params in ends[1:]:
        assert all(torch.equal(mine, other) for mine, other in zip(params, ends[0], strict=True))


@as_torch
@pytest.mark.parametrize("name", [SGD, ADAM])
def test_parameters_states_and_gradients_in_a_row_have_the_bits_of_those_apart(name) -> None:
    sizes = [5, 0, 17, 1, 1000, 33]
    flat, gradients = torch.randn(sum(sizes)), torch.randn(sum(sizes))
    row = [nn.Parameter(part) for part in flat.clone().split(sizes)]
    apart = [nn.Parameter(part.clone()) for part in flat.split(sizes)]
    ours = getattr(gs.optim, name)(row, lr=0.1, **({"momentum": 0.9} if name == SGD else {}))
    theirs = getattr(torch.optim, name)(apart, lr=0.1, **({"momentum": 0.9} if name == SGD else {}))
    for _ in range(3):
        for mine, other, part in zip(row, apart, gradients.split(sizes), strict=True):
            mine.grad, other.grad = part, part.clone()
        ours.step()
        theirs.step()
    assert_same((row, ours), (apart, theirs))
    for key in {SGD: ["momentum_buffer"], ADAM: ["exp_avg", "exp_avg_sq"]}[name]:
        states = [ours.state[param][key] for param in row]
        starts = [(state.data_ptr() - states[0].data_ptr()) // 4 for state in states if state.numel()]
        assert starts == [0, 5, 22, 23, 1023], "new states lie in a row where the parameters do"


@as_torch
@pytest.mark.parametrize("name", [SGD, ADAM])
def test_any_strides_of_parameters_gradients_and_states_have_torchs_bits(name) -> None:
    def build():
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(2, 3, 5, 4, generator=generator)
        wide = torch.randn(6, 14, generator=generator)
        params = [
            nn.Parameter(image.clone(memory_format=torch.channels_last)),
            nn.Parameter(wide.clone()[:, ::2]),
            nn.Parameter(wide.clone().t()),
            nn.Parameter(torch.randn(3, generator=generator)),
            nn.Parameter(wide.clone()[1:5, 3:9]),
        ]
        grads = [
            [torch.randn(param.shape, generator=generator) for param in params],
            [torch.empty_like(param).normal_(generator=generator) for param in params],
        ]
        return params, grads

    options = {"momentum": 0.9} if name == SGD else {}
    (mine, grads), (other, _) = build(), build()
    ours = getattr(gs.optim, name)(mine, lr=0.1, **options)
    theirs = getattr(torch.optim, name)(other, lr=0.1, **options)
    for index in range(4):
        for params, optimizer in ((mine, ours), (other, theirs)):
            for param, grad in zip(params, grads[index % 2], strict=True):
                param.grad = grad.clone(memory_format=torch.preserve_format)
            optimizer.step()
        assert_same((mine, ours), (other, theirs))
    strides = [param.stride() for param in build()[0]]
    assert [param.stride() for param in mine] == strides, "a step moves nothing"
