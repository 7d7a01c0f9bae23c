# fuse_optimizer: fuse_step() leaves the bits that step() leaves, for every optimizer, dtype and layout, and whatever
# happens to gradients, states and memory between steps. Its surroundings and refusals: test_fuse_cases.py.

import pytest
import torch
from torch import nn, optim

import gossamer as gs
from gossamer.bagua.torch_api.contrib import fuse_optimizer
from gossamer.bagua.torch_api.contrib.fuse.optimizer import ELEMENTWISE
from tests.support.optimizers import BF16, F32, F64, FP16, assert_same, build, give_gradients, runs_of

DTYPES = {"float32": [F32], "float64": [F64], "mixed": [F64, F32, F32, F32], "low": [BF16, FP16, F32, F32]}
OPTIMIZERS = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
]


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", None))
def test_bits_are_those_of_the_unfused_step(kind, options, dtypes) -> None:
    plain, fused = build(kind, options, DTYPES[dtypes]), build(kind, options, DTYPES[dtypes])
    assert fuse_optimizer(fused[1]) is fused[1]
    for step in range(12):
        for params, _ in (plain, fused):
            give_gradients(params, step, holes=step > 5)
        plain[1].step()
        assert fused[1].fuse_step() is None
        if step == 5:
            assert (
                sum(runs_of(fused[1])) >= 4
            )  # 16-bit parameters, and those of no dimension or element, are alone
    assert_same(fused, plain)


def test_every_optimizer_that_may_be_fused_is_tested() -> None:
    assert {kind for kind, _ in OPTIMIZERS} == set(ELEMENTWISE)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_bits_are_equal_for_tensors_that_several_threads_share(kind) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ends = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(1)
        params = [
            nn.Parameter(torch.randn(numel, generator=generator)) for numel in (70_001, 33_333, 100_003)
        ]
        optimizer = kind(params, lr=0.1)
        if fused:
            fuse_optimizer(optimizer)
        for step in range(3):
            give_gradients(params, step, holes=False)
            (optimizer.fuse_step if fused else optimizer.step)()
        ends.append((params, optimizer))
    torch.set_num_threads(before)
    assert_same(ends[1], ends[0])


def test_gradients_in_every_layout_give_the_same_bits() -> None:
    """Fresh ones, kept and zeroed ones, views of one buffer in the parameters' order, strided ones."""
    ends = []
    for fused in (False, True):
        params, optimizer = build(optim.Adam, {})
        if fused:
            fuse_optimizer(optimizer)
        for step in range(4):
            give_gradients(params, step, holes=False)
            buffer = torch.cat([param.grad.flatten() for param in params])
            offset = 0
            for param in params:
                if step == 1:
                    param.grad = buffer[offset : offset + param.numel()].view(param.shape)
                    if param.shape == (8, 8):
                        param.grad = param.grad.t()  # in the row, but not in its order
                elif step == 2 and param.dim() == 2:
                    param.grad = param.grad.t().contiguous().t()
                offset += param.numel()
            (optimizer.fuse_step if fused else optimizer.step)()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step % 2:
                assert all(not param.grad.any() for param in params)
        ends.append((params, optimizer))
    assert_same(ends[1], ends[0])


def test_gradients_in_a_row_are_not_copied() -> None:
    params = [nn.Parameter(torch.randn(4, 2)) for _ in range(3)]
    optimizer = fuse_optimizer(optim.SGD(params, lr=0.1))
    buffer = torch.randn(24)
    for param, part in zip(params, buffer.split(8), strict=True):
        param.grad = part.view(4, 2)
    before, taken = [param.grad for param in params], []
    optimizer.register_step_pre_hook(
        lambda own, *_: taken.append(own.param_groups[0]["params"][0].grad.data_ptr())
    )
    optimizer.fuse_step()
    assert taken == [buffer.data_ptr()]
    assert all(param.grad is gradient for param, gradient in zip(params, before, strict=True))


def test_state_goes_through_a_file_between_fused_and_unfused(tmp_path) -> None:
    plain, fused = build(optim.Adam, {}), build(optim.Adam, {})
    fuse_optimizer(fused[1])
    for step in range(3):
        for params, optimizer in (plain, fused):
            give_gradients(params, step)
            getattr(optimizer, "fuse_step", optimizer.step)()
    # crosswise: a state that the fused optimizer saved is loaded into the unfused one, and the other way round
    for number, (_, optimizer) in enumerate((plain, fused)):
        torch.save(optimizer.state_dict(), tmp_path / f"{number}.pt")
    plain[1].load_state_dict(torch.load(tmp_path / "1.pt", weights_only=True))
    fused[1].load_state_dict(torch.load(tmp_path / "0.pt", weights_only=True))
    for step in range(3, 6):
        for params, optimizer in (plain, fused):
            give_gradients(params, step)
            getattr(optimizer, "fuse_step", optimizer.step)()
    assert_same(fused, plain)
    assert max(runs_of(fused[1])) > 1


def test_plain_steps_between_fused_ones_and_changed_states_count() -> None:
    plain, fused = build(optim.AdamW, {}), build(optim.AdamW, {})
    fuse_optimizer(fused[1])
    for step in range(9):
        for params, optimizer in (plain, fused):
            give_gradients(params, step, holes=False)
            getattr(optimizer, "fuse_step" if step % 3 and hasattr(optimizer, "fuse_step") else "step")()
            if step == 1:  # between two fused steps, as are the others
                optimizer.state[params[0]]["exp_avg"] = torch.ones_like(params[0])
            if step == 4:
                del optimizer.state[params[3]]
            if step == 7:
                optimizer.state[params[1]]["step"].fill_(40.0)
    assert_same(fused, plain)


def test_moved_parameters_are_moved_back_or_an_error() -> None:
    ends = []
    for mode in ("plain", "checked", "unchecked"):
        params, optimizer = build(optim.SGD, {"lr": 0.1, "momentum": 0.9})
        if mode != "plain":
            fuse_optimizer(optimizer, check_flatten=mode == "checked")
        step_of = optimizer.step if mode == "plain" else optimizer.fuse_step
        give_gradients(params, 0, holes=False)
        step_of()
        params[3].data = params[3].data.clone()
        extra = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [extra, nn.Parameter(torch.ones(4))]})
        give_gradients([*params, *optimizer.param_groups[-1]["params"]], 1, holes=False)
        if mode == "unchecked":
            with pytest.raises(gs.ConfigError, match="parameters were moved or added since fuse_optimizer"):
                step_of()
        else:
            step_of()
            ends.append((params, optimizer))
    assert_same(ends[1], ends[0])


def test_without_flatten_nothing_moves_and_what_lies_in_a_row_is_fused() -> None:
    buffer = torch.randn(30)
    in_a_row = [nn.Parameter(part) for part in buffer.split(10)]
    apart = [nn.Parameter(torch.randn(10)) for _ in range(3)]
    params = in_a_row + apart
    optimizer = fuse_optimizer(optim.SGD(params, lr=0.1), do_flatten=False)
    pointers = [param.data_ptr() for param in params]
    expected = [param.detach().clone() for param in params]
    give_gradients(params, 0, holes=False)
    optimizer.fuse_step()
    assert [param.data_ptr() for param in params] == pointers
    assert runs_of(optimizer) == [3]
    for param, start in zip(params, expected, strict=True):
        assert torch.equal(param, start.add(param.grad, alpha=-0.1))
