# gs.optim and the surroundings of an optimizer: saved states in both directions, schedulers, closures, hooks, missing
# gradients, wrapped models, refusals. The bits of a step: test_steps.py.

import copy
import io

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.optim.test_steps import ADAM, ADAMW, SGD, as_torch, exact_square_root, pair, step  # noqa: F401  (a fixture)
from tests.support.models import batches, mlp, seeded, shard
from tests.support.optimizers import BF16, F32, F64, assert_same, build, give_gradients
from tests.support.ranks import run_ranks

NAMES = pytest.mark.parametrize("name", [SGD, ADAM, ADAMW])
DEFAULTS = {SGD: {"lr": 0.1, "momentum": 0.9}, ADAM: {"weight_decay": 0.1}, ADAMW: {}}


def saved(optimizer) -> dict:
    """The state_dict after a way through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@as_torch
@NAMES
def test_states_go_to_torch_and_back(name) -> None:
    ours, theirs = pair(name, DEFAULTS[name], (F32, F64))
    for index in range(4):
        step((ours, theirs), index)
    mine, other = saved(ours[1]), saved(theirs[1])
    ours[1].load_state_dict(other)
    theirs[1].load_state_dict(mine)
    for index in range(4, 10):
        step((ours, theirs), index)
        assert_same(ours, theirs)


@as_torch
@NAMES
@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_states_of_torchs_other_forms_are_loaded(name, form) -> None:
    """torch's choice among its forms does not affect the next step."""
    theirs = build(getattr(torch.optim, name), DEFAULTS[name] | {form: True})
    for index in range(3):
        step([theirs], index, holes=False)  # torch's fused SGD takes no gradients that come later
    ours = build(getattr(gs.optim, name), DEFAULTS[name])
    ours[1].load_state_dict(saved(theirs[1]))
    with torch.no_grad():
        for mine, other in zip(ours[0], theirs[0], strict=True):
            mine.copy_(other)
    for group in theirs[1].param_groups:
        group[form] = None
    assert_same(ours, theirs)
    for index in range(3, 6):
        step((ours, theirs), index)
        assert_same(ours, theirs)


@NAMES
def test_states_of_16_bit_parameters_keep_their_float32_bits(name) -> None:
    ours = build(getattr(gs.optim, name), DEFAULTS[name], (BF16, F32))
    for index in range(3):
        step([ours], index)
    others = build(getattr(gs.optim, name), DEFAULTS[name], (BF16, F32))
    with torch.no_grad():
        for mine, other in zip(ours[0], others[0], strict=True):
            other.copy_(mine)
    others[1].load_state_dict(saved(ours[1]))
    assert_same(others, ours)
    for index in range(3, 6):
        step((ours, others), index)
    assert_same(others, ours)


@NAMES
def test_states_that_torch_kept_in_16_bits_become_float32(name) -> None:
    theirs = build(getattr(torch.optim, name), DEFAULTS[name], (BF16,))
    ours = build(getattr(gs.optim, name), DEFAULTS[name], (BF16,))
    step([theirs], 0)
    ours[1].load_state_dict(saved(theirs[1]))
    step([ours], 1)
    keys = {"step", "exp_avg", "exp_avg_sq"} if name != SGD else {"momentum_buffer"}
    for state in ours[1].state.values():
        assert state.keys() == keys
        assert all(value.dtype == F32 for value in state.values())


def test_what_a_pre_hook_puts_in_the_place_of_a_state_dict_is_loaded() -> None:
    ours = build(gs.optim.Adam, {}, (BF16,))
    step([ours], 0)
    wanted = saved(ours[1])
    fresh = build(gs.optim.Adam, {}, (BF16,))
    fresh[1].register_load_state_dict_pre_hook(lambda _optimizer, _given: wanted)
    fresh[1].load_state_dict(build(gs.optim.Adam, {"lr": 7.0}, (BF16,))[1].state_dict())
    assert fresh[1].state_dict()["param_groups"] == wanted["param_groups"]
    for mine, other in zip(fresh[1].state.values(), wanted["state"].values(), strict=True):
        assert torch.equal(mine["exp_avg"], other["exp_avg"])


@NAMES
def test_a_copy_of_an_optimizer_steps_as_the_first_does(name) -> None:
    ours = build(getattr(gs.optim, name), DEFAULTS[name])
    step([ours], 0)
    other = copy.deepcopy(ours)
    step((ours, other), 1)
    assert_same(other, ours)
    for mine, its in zip(ours[0], other[0], strict=True):
        assert mine.numel() == 0 or mine.data_ptr() != its.data_ptr()


@as_torch
@NAMES
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10),
    ],
    ids=["exponential", "one cycle"],  # the latter also moves momentum or beta1
)
def test_learning_rates_of_a_scheduler_are_used(name, scheduler) -> None:
    ours, theirs = pair(name, DEFAULTS[name])
    before = ours[1].param_groups[0]["lr"]
    schedulers = [scheduler(ours[1]), scheduler(theirs[1])]
    for index in range(8):
        step((ours, theirs), index)
        for each in schedulers:
            each.step()
        assert_same(ours, theirs)
    assert ours[1].param_groups[0]["lr"] != before


@NAMES
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(name) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = getattr(gs.optim, name)([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert optimizer.step(closure).item() < 3.0
    assert optimizer.step() is None


@NAMES
def test_step_hooks_and_schedulers_see_every_step(name) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = getattr(gs.optim, name)([param], lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    param.grad = torch.ones(3)
    optimizer.step()
    assert seen == ["before", "after"]


@NAMES
def test_without_any_gradient_nothing_changes(name) -> None:
    params, optimizer = build(getattr(gs.optim, name), DEFAULTS[name])
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert not optimizer.state


@NAMES
def test_backward_through_a_parameter_that_was_stepped_is_an_error(name) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = getattr(gs.optim, name)([param], lr=0.1)
    loss = param.square().sum()
    param.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@NAMES
def test_steps_are_counted_in_torchs_dtype(name) -> None:
    torch.set_default_dtype(F64)
    try:
        ours, theirs = pair(name, DEFAULTS[name], (F64,))
        step((ours, theirs), 0)
    finally:
        torch.set_default_dtype(F32)
    for mine, other in zip(ours[1].state.values(), theirs[1].state.values(), strict=True):
        assert {key: value.dtype for key, value in mine.items()} == {
            key: value.dtype for key, value in other.items()
        }


@as_torch
@NAMES
def test_a_wrapped_model_trains_to_the_bits_of_torchs_optimizer(name) -> None:
    def train(comm, kind):
        model = seeded(mlp)
        optimizer = kind(model.parameters(), **DEFAULTS[name])
        algorithm = gs.GradientAllReduce(deterministic=True)
        wrapped = gs.DataParallel(model, optimizer, algorithm=algorithm, process_group=comm, bucket_bytes=700)
        for batch in batches(5):
            optimizer.zero_grad()
            wrapped(shard(batch, comm)).square().mean().backward()
            optimizer.step()
        wrapped.close()
        return [param.detach().clone() for param in model.parameters()]

    for mine, other in run_ranks(
        2, lambda comm: (train(comm, getattr(gs.optim, name)), train(comm, getattr(torch.optim, name)))
    ):
        assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((SGD, option) for option in ("foreach", "differentiable", "fused")),
        *((name, option) for name in (ADAM, ADAMW) for option in ("amsgrad", "foreach", "capturable")),
        *((name, option) for name in (ADAM, ADAMW) for option in ("differentiable", "fused")),
    ],
)
def test_options_that_are_not_supported_are_refused_with_their_value(name, option) -> None:
    kind, params = getattr(gs.optim, name), [nn.Parameter(torch.ones(2))]
    message = f"{name}: {option} must be left out, got True; .* torch.optim.{name} has it"
    with pytest.raises(gs.ConfigError, match=message):
        kind(params, **{option: True})
    with pytest.raises(gs.ConfigError, match=message):
        kind([{"params": params, option: True}])
    kind(params, **{option: False})


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_states_saved_with_what_is_not_supported_are_refused_and_change_nothing(option) -> None:
    ours, theirs = build(gs.optim.Adam, {}), build(torch.optim.Adam, {option: True, "lr": 0.5})
    step([ours], 0)
    before = copy.deepcopy(ours[1].state_dict())
    with pytest.raises(gs.ConfigError, match=f"Adam: {option} must be left out, got True"):
        ours[1].load_state_dict(theirs[1].state_dict())
    assert ours[1].state_dict()["param_groups"] == before["param_groups"]
    ours[1].load_state_dict(before)  # no hook is left behind


@NAMES
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_parameters_that_are_no_dense_floats_are_refused(name, dtype) -> None:
    kind = getattr(gs.optim, name)
    with pytest.raises(gs.ConfigError, match=f"{name}: parameters must be dense float32, .* got .*complex"):
        kind([nn.Parameter(torch.ones(2, dtype=dtype))])
    optimizer = kind([nn.Parameter(torch.ones(2))])
    with pytest.raises(gs.ConfigError, match="parameters must be dense"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=dtype))]})
    assert len(optimizer.param_groups) == 1


@NAMES
def test_sparse_gradients_are_refused_before_anything_changes(name) -> None:
    dense, table = nn.Parameter(torch.ones(4)), nn.Embedding(5, 3, sparse=True)
    optimizer = getattr(gs.optim, name)([dense, table.weight], lr=0.1)
    (dense.sum() + table(torch.tensor([1, 3])).sum()).backward()
    before = table.weight.detach().clone()
    with pytest.raises(
        gs.ConfigError, match=f"{name}: the gradient of a parameter .* must be dense .* got Sparse"
    ):
        optimizer.step()
    assert torch.equal(dense, torch.ones(4))
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_states_that_do_not_fit_are_refused(key) -> None:
    params, optimizer = build(gs.optim.Adam, {})
    give_gradients(params, 1, holes=False)
    optimizer.step()
    optimizer.state[params[0]][key] = torch.zeros(6)
    with pytest.raises(gs.ConfigError, match=r"Adam: the state of a parameter .* must be dense .*\[6\]"):
        optimizer.step()


def test_a_step_count_that_is_not_on_the_cpu_or_no_number_is_refused() -> None:
    params, optimizer = build(gs.optim.Adam, {})
    give_gradients(params, 1, holes=False)
    optimizer.step()
    optimizer.state[params[0]]["step"] = torch.ones(2)
    with pytest.raises(gs.ConfigError, match="Adam: step must be one float32 or float64 on the CPU"):
        optimizer.step()
