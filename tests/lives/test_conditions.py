"""What averaging relies on, and what scripts do to it: memory, forwards, backwards and optimizers of their own.

Each cell trains as the same script does without the habit, or is one ConfigError on all ranks.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import gossamer as gs
from tests.support.jobs import Job
from tests.support.models import flat_weights, seeded

STEPS, LR = 6, 0.1
ALGORITHMS: dict[str, Callable[[], gs.Algorithm]] = {
    "exact": gs.GradientAllReduce,
    "int4 with feedback": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())),
    "powersgd": lambda: gs.PowerSGD(start_step=1),
    "qadam": gs.QAdam,
    "zero_one_adam": gs.ZeroOneAdam,
    "decentralized": gs.Decentralized,
    "low_precision_decentralized": gs.LowPrecisionDecentralized,
    "local_sgd": lambda: gs.LocalSGD(1),
    "diloco": lambda: gs.LocalSGD(2, lambda params: torch.optim.SGD(params, 0.7)),
    "sharded": gs.Sharded,
}
pytestmark = pytest.mark.usefixtures("job")


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(3) as job, job.within(gs.init, gs.shutdown):
        yield job


class Net(nn.Module):
    """Three parts, each in a reentrant checkpoint if asked for, and a frozen one."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.third = nn.Linear(5, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.frozen(self.third(self.second(self.first(x))))
        x = x.clone().requires_grad_()
        for part in (self.first, self.second, self.third):
            x = checkpoint(part, x, use_reentrant=True)
        return self.frozen(x)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def optimizer_of(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "sharded":
        return gs.ShardedOptimizer(torch.optim.SGD, params, lr=LR, momentum=0.9)
    if name in ("qadam", "zero_one_adam"):
        return {"qadam": gs.QAdamOptimizer, "zero_one_adam": gs.ZeroOneAdamOptimizer}[name](params, 0.02, 2)
    return torch.optim.SGD(params, LR, momentum=0.9)


def inputs() -> Tensor:
    """This rank's [STEPS, 4, 6]."""
    return torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(gs.rank()))


def every(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(gs.size())]
    dist.all_gather(found, x)
    return found


def require_promised(wrapped: gs.DataParallel, name: str) -> None:
    """All ranks hold what the algorithm promises: equal weights, at the latest after consensus()."""
    if name not in ("exact", "powersgd", "qadam", "int4 with feedback", "sharded"):
        wrapped.consensus()
    weights = flat_weights(wrapped.module)
    assert all(torch.equal(each, weights) for each in every(weights))


def train(
    name: str,
    forward: Callable[[gs.DataParallel, Tensor], Tensor] = lambda wrapped, x: wrapped(x).square().mean(),
    *,
    checkpoints: bool = False,
    before: Callable[[int, gs.DataParallel], None] = lambda step, wrapped: None,
    between: Callable[[int, gs.DataParallel], None] = lambda step, wrapped: None,
) -> Tensor:
    """The weights of this rank after the steps. `before` a step's forward, and `between` its backward and step()."""
    model = seeded(lambda: Net(checkpoints))
    optimizer = optimizer_of(name, model.parameters())
    wrapped = gs.DataParallel(model, optimizer=optimizer, algorithm=ALGORITHMS[name]())
    for step, batch in enumerate(inputs()):
        before(step, wrapped)
        optimizer.zero_grad()
        forward(wrapped, batch).backward()
        between(step, wrapped)
        optimizer.step()
    weights = flat_weights(model)
    assert wrapped.engine.backward_count == STEPS
    require_promised(wrapped, name)
    wrapped.close()
    return weights


# --- parameters that leave the flat memory ---


def cloned(_step: int, wrapped: gs.DataParallel) -> None:
    for param in wrapped.module.parameters():
        param.data = param.data.clone()


def from_vector(_step: int, wrapped: gs.DataParallel) -> None:
    params = [*wrapped.module.parameters()]
    vector_to_parameters(parameters_to_vector(params).clone(), params)


def swapped(use: Callable[[gs.DataParallel], Any]) -> Callable[[int, gs.DataParallel], None]:
    """Other weights in the model, as those of an EMA, for an evaluation."""

    def swap(_step: int, wrapped: gs.DataParallel) -> None:
        params = [*wrapped.module.parameters()]
        own = [param.data for param in params]
        for param in params:
            param.data = torch.full_like(param, 3.0)
        wrapped.eval()
        use(wrapped)
        wrapped.train()
        for param, data in zip(params, own, strict=True):
            param.data = data

    return swap


def under_no_grad(wrapped: gs.DataParallel) -> None:
    with torch.no_grad():
        wrapped(torch.ones(2, 6))


MOVES = {
    "cloned": cloned,
    "vector_to_parameters": from_vector,
    "swapped for a forward": swapped(lambda wrapped: wrapped(torch.ones(2, 6))),
    "swapped for a forward without gradients": swapped(under_no_grad),
    "swapped for consensus": swapped(lambda wrapped: wrapped.consensus()),
}


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_parameters_that_get_other_memory(name, move, when):
    expected = train(name)
    weights = train(name, **{when: MOVES[move]})
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)


# --- forwards and backwards that the wrapper does not see ---

FORWARDS: dict[str, Callable[[gs.DataParallel, Tensor], Tensor]] = {
    "the wrapper": lambda wrapped, x: wrapped(x).square().mean(),
    "model.module": lambda wrapped, x: wrapped.module(x).square().mean(),
    "a method": lambda wrapped, x: wrapped.module.loss(x),
}


@pytest.mark.parametrize("thaw", [False, True], ids=["", "thawed"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "reentrant checkpoints"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_forward_that_the_wrapper_may_not_see(name, forward, checkpoints, thaw):
    def before(step: int, wrapped: gs.DataParallel) -> None:
        if thaw and step == 1:
            wrapped.module.frozen.requires_grad_()

    if thaw and name in ("local_sgd", "diloco"):
        with pytest.raises(
            gs.ConfigError, match="a parameter has become trainable since the model was wrapped"
        ):
            train(name, FORWARDS[forward], checkpoints=checkpoints, before=before)
        return
    expected = train(name, before=before)
    weights = train(name, FORWARDS[forward], checkpoints=checkpoints, before=before)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("forward", ["model.module", "a method"])
@pytest.mark.parametrize("name", ["exact", "decentralized", "local_sgd"])
def test_a_backward_that_raised_is_an_error_in_the_next_one_and_training_goes_on(name, forward):
    model = seeded(Net)
    optimizer = optimizer_of(name, model.parameters())
    wrapped = gs.DataParallel(model, optimizer=optimizer, algorithm=ALGORITHMS[name]())
    for step, batch in enumerate(inputs()):
        optimizer.zero_grad()
        hook = model.first[0].weight.register_hook(lambda _: 1 / 0) if step == 2 else None
        raises = {2: ZeroDivisionError, 3: gs.CommError}.get(step)
        if raises:
            with pytest.raises(raises):
                FORWARDS[forward](wrapped, batch).backward()
        else:
            FORWARDS[forward](wrapped, batch).backward()
            optimizer.step()
        if hook:
            hook.remove()
    require_promised(wrapped, name)


def test_a_parameter_that_a_forward_returns_gains_no_hooks():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(())), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.scale

    model = seeded(Scaled)
    wrapped = gs.DataParallel(model)
    for batch in inputs():
        model.zero_grad()
        output, scale = wrapped(batch)
        (output.square().mean() * scale).backward()
    assert not model.scale._backward_hooks
    assert all(torch.equal(each, model.scale.grad) for each in every(model.scale.grad))


# --- memory that parameters share ---


class Shared(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
        if how == "tied":
            self.decoder.weight.data = self.encoder.weight.data.t()
        elif how == "a buffer":
            self.register_buffer("row", self.encoder.weight.data[0])
        elif how == "parts of one tensor":
            both = torch.randn(48)
            self.encoder.weight.data, self.decoder.weight.data = both[:24].view(4, 6), both[24:].view(6, 4)
        elif how == "columns of one matrix":
            both = torch.randn(4, 12)
            self.encoder.weight.data, self.decoder.weight.data = both[:, :6], both[:, 6:].t()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


@pytest.mark.parametrize(
    "how", ["tied", "tied later", "a buffer", "parts of one tensor", "columns of one matrix"]
)
@pytest.mark.parametrize("name", ["exact", "decentralized", "local_sgd", "sharded"])
def test_parameters_with_memory_in_common(name, how):
    model, refused = (
        seeded(lambda: Shared(how)),
        name != "exact" and how in ("tied", "tied later", "a buffer"),
    )

    def run() -> None:
        optimizer = optimizer_of(name, model.parameters())
        wrapped = gs.DataParallel(model, optimizer=optimizer, algorithm=ALGORITHMS[name]())
        for step, batch in enumerate(inputs()):
            if how == "tied later" and step == 1:
                model.decoder.weight.data = model.encoder.weight.data.t()
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()
        require_promised(wrapped, name)

    if refused:
        with pytest.raises(gs.ConfigError, match=r"'.*' and '.*' share memory"):
            run()
        return
    run()
    assert torch.equal(model.decoder.weight, model.encoder.weight.t()) == (how in ("tied", "tied later"))


# --- optimizers ---


class ByAnother(torch.optim.Optimizer):
    """As Lookahead: its step() calls another optimizer's."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, LR)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


OPTIMIZERS = [
    "anew each step",
    "anew once",
    "one becomes two",
    "one stops",
    "one steps rarely",
    "by another",
    "raised",
]


def train_by_optimizers(model: Net, habit: str, loss: Callable[[int], Tensor]) -> Iterator[Any]:
    """Yields the optimizers first. Then makes the steps."""

    def one() -> list[Any]:
        return [torch.optim.SGD(model.parameters(), LR)]

    def two() -> list[Any]:
        return [torch.optim.SGD(each, LR) for each in (model.first.parameters(), model.third.parameters())]

    optimizers = {"one stops": two, "one steps rarely": two}.get(habit, one)()
    if habit == "by another":
        optimizers = [ByAnother(list(model.parameters()))]
    yield optimizers
    for step in range(STEPS):
        if habit == "anew each step" or (habit == "anew once" and step == 3):
            optimizers = one()
        if habit == "one becomes two" and step == 3:
            optimizers = two()
        if habit == "raised" and step == 3:
            with pytest.raises(TypeError):
                optimizers[0].step(closure=3)
        model.zero_grad()
        loss(step).backward()
        optimizers[0].step()
        rests = (habit == "one stops" and step >= 3) or (habit == "one steps rarely" and step % 3 != 2)
        for optimizer in optimizers[1:] if not rests else []:
            optimizer.step()


@pytest.mark.parametrize("habit", OPTIMIZERS)
def test_local_sgd_averages_whatever_optimizer_steps(habit):
    """By one process with all the data: an averaging after each step. An idle optimizer is noticed a step late."""
    model, expected = seeded(Net), seeded(Net)
    run = train_by_optimizers(model, habit, lambda step: wrapped(inputs()[step]).square().mean())
    wrapped = gs.DataParallel(model, optimizer=next(run), algorithm=gs.LocalSGD(1))
    list(run)
    weights = flat_weights(model)
    assert all(torch.equal(each, weights) for each in every(weights))
    together = every(inputs())
    alone = train_by_optimizers(
        expected, habit, lambda step: torch.stack([expected.loss(each[step]) for each in together]).mean()
    )
    list(alone)
    late = habit in ("one stops", "one steps rarely")
    torch.testing.assert_close(weights, flat_weights(expected), rtol=1e-5, atol=2e-3 if late else 1e-6)


@pytest.mark.parametrize("name", ["qadam", "zero_one_adam", "sharded"])
def test_an_algorithm_with_an_optimizer_of_its_own_refuses_another_one(name):
    model = seeded(Net)
    wrapped = gs.DataParallel(
        model, optimizer=optimizer_of(name, model.parameters()), algorithm=ALGORITHMS[name]()
    )
    wrapped(inputs()[0]).square().mean().backward()
    with pytest.raises(gs.ConfigError, match="the model was wrapped with another optimizer than the SGD"):
        torch.optim.SGD(model.parameters(), LR).step()


@pytest.mark.parametrize("name", ["qadam", "zero_one_adam", "sharded", "local_sgd"])
def test_a_schedule_goes_on_after_the_optimizers_state_was_loaded(name):
    def run(*, load: bool) -> Tensor:
        model = seeded(Net)
        optimizer = optimizer_of(name, model.parameters())
        wrapped = gs.DataParallel(model, optimizer=optimizer, algorithm=ALGORITHMS[name]())
        for step, batch in enumerate(inputs()):
            if load and step == 3:
                if name == "sharded":
                    optimizer.consolidate_state_dict(to=None)
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for group in optimizer.param_groups:
                group["weight_decay"], group["lr"] = 0.05 * step, 0.01 * (step + 1)
                if "betas" in group:
                    group["betas"] = (0.9 - 0.05 * step, 0.99)
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()
        wrapped.close()
        return flat_weights(model)

    assert torch.equal(run(load=True), run(load=False))


# --- what a model may hold ---


def test_consensus_leaves_what_has_no_mean():
    model = seeded(Net)
    held = {
        "integers": torch.arange(4),
        "bits": torch.ones(3, dtype=torch.bool),
        "eighths": torch.ones(4).to(torch.float8_e4m3fn),
    }
    for name, value in held.items():
        model.register_parameter(name, nn.Parameter(value, requires_grad=False))
        model.register_buffer(f"{name}_too", value.clone())
    optimizer = torch.optim.SGD(model.first.parameters(), LR)
    wrapped = gs.DataParallel(model, optimizer=optimizer, algorithm="decentralized")
    with torch.no_grad():
        model.first[0].weight.add_(gs.rank())
    wrapped.consensus()
    for name, value in held.items():
        assert torch.equal(getattr(model, name).float(), value.float())
    weight = model.first[0].weight.detach()
    assert all(torch.equal(each, weight) for each in every(weight))


@pytest.mark.parametrize("change", ["pruned", "added", "removed"])
def test_a_state_is_loaded_after_the_model_has_changed(change):
    model = seeded(Net)
    wrapped = gs.DataParallel(model)
    if change == "pruned":
        prune.l1_unstructured(model.first[0], "weight", amount=0.5)
    elif change == "added":
        model.extra = nn.Linear(2, 2)
    else:
        del model.frozen
        model.frozen = nn.Identity()
    state = copy.deepcopy(model.state_dict())
    if change == "added":
        with pytest.raises(gs.ConfigError, match=r"parameter 'extra\.weight' is another object"):
            wrapped.load_state_dict(state)
        return
    wrapped.load_state_dict(state)
    wrapped(inputs()[0]).square().mean().backward()
    grads = torch.cat([param.grad.reshape(-1) for param in model.parameters() if param.grad is not None])
    assert all(torch.equal(each, grads) for each in every(grads))


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized", "local_sgd in lockstep"])
def test_an_infinite_gradient_of_one_of_two_optimizers(name):
    """On one rank. A GradScaler skips that optimizer's step on all ranks, and the other one's on none."""
    model = seeded(Net)
    first, second = (torch.optim.SGD(part.parameters(), LR) for part in (model.first, model.third))
    algorithm = gs.LocalSGD(2, lockstep=True) if name not in ALGORITHMS else ALGORITHMS[name]()
    wrapped = gs.DataParallel(model, optimizer=[first, second], algorithm=algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    steps = {first: 0, second: 0}
    for optimizer in steps:
        optimizer.register_step_post_hook(lambda one, *_: steps.update({one: steps[one] + 1}))
    for step, batch in enumerate(inputs()):
        model.zero_grad()
        bad = step == 2 and gs.rank() == 1
        hook = model.first[0].bias.register_hook(lambda grad, bad=bad: grad / 0 if bad else grad)
        scaler.scale(wrapped(batch).square().mean()).backward()
        hook.remove()
        for optimizer in steps:
            scaler.step(optimizer)
        scaler.update()
    assert list(steps.values()) == [STEPS - 1, STEPS]
    require_promised(wrapped, name)
