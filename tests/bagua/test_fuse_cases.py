# fuse_optimizer: the surroundings of a step (hooks, schedulers, DataParallel, copies, failures), and refusals.

import copy
import pickle

import pytest
import torch
from torch import nn, optim

import gossamer as gs
from gossamer.bagua.torch_api.contrib import fuse_optimizer
from gossamer.bagua.torch_api.contrib.fuse.optimizer import fuse_step, is_fused_optimizer
from tests.support.optimizers import assert_same, build, give_gradients, runs_of


@pytest.mark.filterwarnings("error")
def test_scheduler_hooks_and_closure_work_as_with_step() -> None:
    model = nn.Linear(4, 3)
    optimizer = fuse_optimizer(optim.SGD(model.parameters(), lr=0.1))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    optimizer.register_step_post_hook(lambda own, *_: seen.append(own is optimizer))
    before = model.weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    assert optimizer.fuse_step(closure).requires_grad
    scheduler.step()  # warns, which is an error here, if it has seen no step
    assert torch.allclose(model.weight, before - 0.1 * 2)
    optimizer.fuse_step(closure)
    assert torch.allclose(model.weight, before - 0.15 * 2)
    assert seen == [True, True]


def test_step_that_raises_leaves_groups_and_states_of_the_parameters() -> None:
    params, optimizer = build(optim.Adam, {})
    fuse_optimizer(optimizer)
    give_gradients(params, 0, holes=False)
    optimizer.fuse_step()
    failing = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.fuse_step()
    failing.remove()
    assert [param for group in optimizer.param_groups for param in group["params"]] == params
    assert set(optimizer.state) == set(params)
    optimizer.fuse_step()
    reference, plain = build(optim.Adam, {})
    give_gradients(reference, 0, holes=False)
    plain.step()
    plain.step()
    assert_same((params, optimizer), (reference, plain))


def test_sparse_gradients_are_stepped_alone() -> None:
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        table, layers = nn.Embedding(10, 3, sparse=True), [nn.Linear(3, 3) for _ in range(2)]
        optimizer = optim.SGD([*table.parameters(), *layers[0].parameters(), *layers[1].parameters()], lr=0.1)
        if fused:
            fuse_optimizer(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            layers[1](layers[0](table(torch.tensor([step, 1])))).sum().backward()
            (optimizer.fuse_step if fused else optimizer.step)()
        ends.append(([*table.parameters(), *layers[0].parameters(), *layers[1].parameters()], optimizer))
    assert runs_of(ends[1][1]) == [4]
    assert_same(ends[1], ends[0])


def test_gradient_that_becomes_sparse_leaves_its_run() -> None:
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 3)) for _ in range(4)]
        optimizer = optim.SGD(params, lr=0.1)
        if fused:
            fuse_optimizer(optimizer)
        for step in range(3):
            give_gradients(params, step, holes=False)
            if step == 1:
                params[1].grad = params[1].grad.to_sparse(1)
            (optimizer.fuse_step if fused else optimizer.step)()
            if fused:
                assert runs_of(optimizer) == ([2] if step == 1 else [4])
        ends.append((params, optimizer))
    assert_same(ends[1], ends[0])


def test_fused_optimizer_under_data_parallel_trains_as_unfused() -> None:
    gs.init()
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
        optimizer = optim.Adam(model.parameters())
        wrapped = gs.DataParallel(model, optimizer)
        if fused:
            fuse_optimizer(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            wrapped(torch.randn(5, 4, generator=generator)).square().mean().backward()
            (optimizer.fuse_step if fused else optimizer.step)()
        wrapped.close()
        ends.append((list(model.parameters()), optimizer))
    gs.shutdown()
    assert_same(ends[1], ends[0])


def test_only_the_instance_is_changed_and_copies_are_unfused() -> None:
    params, optimizer = build(optim.Adam, {})
    fuse_optimizer(optimizer)
    assert is_fused_optimizer(optimizer)
    assert not hasattr(optim.Adam, "fuse_step")
    assert not is_fused_optimizer(build(optim.Adam, {})[1])
    give_gradients(params, 0)
    fuse_step(optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not is_fused_optimizer(other)
        with pytest.raises(gs.ConfigError, match=r"call fuse_optimizer\(\) on this Adam first"):
            fuse_step(other)


def test_backward_of_a_forward_before_the_step_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = fuse_optimizer(optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(2, 3)).sum()
    give_gradients(list(model.parameters()), 0, holes=False)
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Sign(optim.Optimizer):
    """An elementwise optimizer of a user's, with a Python number in its state."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.add_(param.grad.sign(), alpha=-group["lr"] / state["step"])


class Whole(Sign):
    def step(self, closure=None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["norms"] = torch.ones(3)


def test_optimizer_of_a_user_is_fused_on_his_word() -> None:
    params = [nn.Parameter(torch.randn(5)) for _ in range(3)]
    expected = [param.detach().clone() for param in params]
    with pytest.raises(
        gs.ConfigError, match="must be elementwise, one of SGD, .* got Sign; .*elementwise=True"
    ):
        fuse_optimizer(Sign(params))
    optimizer = fuse_optimizer(Sign(params), elementwise=True)
    for step in range(2):
        give_gradients(params, step, holes=False)
        optimizer.fuse_step()
        expected = [
            one - 0.1 / (step + 1) * param.grad.sign() for one, param in zip(expected, params, strict=True)
        ]
    assert runs_of(optimizer) == [3]
    assert all(torch.allclose(param, want) for param, want in zip(params, expected, strict=True))
    assert [optimizer.state[param]["step"] for param in params] == [2, 2, 2]
    optimizer = fuse_optimizer(Whole(params), elementwise=True)
    with pytest.raises(
        gs.ConfigError, match=r"state 'norms' of \[3\] for a parameter of \[15\] is not elementwise"
    ):
        optimizer.fuse_step()


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Adafactor", "Muon"])
def test_what_is_not_elementwise_is_refused(name) -> None:
    kind = getattr(optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    with pytest.raises(gs.ConfigError, match=f"must be elementwise, .* got {name}"):
        fuse_optimizer(kind([nn.Parameter(torch.ones(2, 2))]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fused": True}, "fused=True kernels on the CPU"),
        ({"differentiable": True}, "differentiable=True records"),
    ],
)
def test_options_that_cannot_be_fused_are_refused(options, message) -> None:
    with pytest.raises(gs.ConfigError, match=message):
        fuse_optimizer(build(optim.Adam, options)[1])


def test_twice_or_no_optimizer_is_refused() -> None:
    optimizer = fuse_optimizer(build(optim.SGD, {})[1])
    with pytest.raises(gs.ConfigError, match="this SGD is fused already"):
        fuse_optimizer(optimizer)
    with pytest.raises(gs.ConfigError, match="needs a torch.optim.Optimizer, got list"):
        fuse_optimizer([optimizer])
