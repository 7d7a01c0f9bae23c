"""What averaging relies on, and what scripts do to it: memory, forwards, backwards, parameters that come and go.

Each cell trains as the same script does without the habit, or is one ConfigError on all ranks. Optimizers are in
test_optimizers.py.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import gossamer as gs
from tests.lives.every import CELLS, FACES, HAS_LIGHTNING, NAMES, OURS, fabric_of, optimizer_of
from tests.lives.scripts import Net, Script, every, fit, inputs, loss_of, nothing, train
from tests.support.jobs import Job
from tests.support.models import seeded
from tests.support.promises import require_promised

#: For what does not depend on the algorithm: one that averages gradients, and two that average weights.
FEW = [(face, name) for face, name in CELLS if name in ("gradient_allreduce", "decentralized", "local_sgd")]
KEEPS_PLAN = ("local_sgd", "local_sgd with delay", "diloco", "async")
pytestmark = pytest.mark.usefixtures("job")


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(3) as job, job.within(gs.init, gs.shutdown):
        yield job


@functools.cache
def plain(face: str, name: str, thaw: bool = False) -> Tensor:
    """The weights of a script without habits."""
    return train(face, name, before=thaws if thaw else nothing)


def require_same(weights: Tensor, expected: Tensor, name: str) -> None:
    if name != "async":  # whose averages come when they come
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)


def thaws(step: int, script: Script) -> None:
    if step == 1:
        script.model.frozen.requires_grad_()


# --- parameters that leave the flat memory ---


def cloned(_step: int, script: Script) -> None:
    for param in script.model.parameters():
        param.data = param.data.clone()


def from_vector(_step: int, script: Script) -> None:
    params = [*script.model.parameters()]
    vector_to_parameters(parameters_to_vector(params).clone(), params)


def swapped(use: Callable[[Script], Any]) -> Callable[[int, Script], None]:
    """Other weights in the model, as those of an EMA, for an evaluation."""

    def swap(_step: int, script: Script) -> None:
        params = [*script.model.parameters()]
        own = [param.data for param in params]
        for param in params:
            param.data = torch.full_like(param, 3.0)
        script.wrapped.forward.eval()
        use(script)
        script.wrapped.forward.train()
        for param, data in zip(params, own, strict=True):
            param.data = data

    return swap


def under_no_grad(script: Script) -> None:
    with torch.no_grad():
        script.wrapped.forward(torch.ones(2, 6))


MOVES = {
    "cloned": cloned,
    "vector_to_parameters": from_vector,
    "swapped for a forward": swapped(lambda script: script.wrapped.forward(torch.ones(2, 6))),
    "swapped for a forward without gradients": swapped(under_no_grad),
    "swapped for consensus": swapped(lambda script: script.wrapped.own.consensus()),
}


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(("face", "name"), CELLS)
def test_parameters_that_get_other_memory(face, name, move, when):
    weights = train(face, name, **{when: MOVES[move]})
    require_same(weights, plain(face, name), name)


# --- forwards and backwards that the wrapper does not see ---

FORWARDS: dict[str, Callable[[Script, Tensor], Tensor]] = {
    "the wrapper": loss_of,
    "model.module": lambda script, x: script.model(x).square().mean(),
    "a method": lambda script, x: script.model.loss(x),
}


@pytest.mark.parametrize("thaw", [False, True], ids=["", "thawed"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "reentrant checkpoints"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(("face", "name"), CELLS)
def test_a_forward_that_the_wrapper_may_not_see(face, name, forward, checkpoints, thaw):
    before = thaws if thaw else nothing
    if thaw and name in KEEPS_PLAN:
        with pytest.raises(
            gs.ConfigError, match="a parameter has become trainable since the model was wrapped"
        ):
            train(face, name, FORWARDS[forward], checkpoints=checkpoints, before=before)
        return
    weights = train(face, name, FORWARDS[forward], checkpoints=checkpoints, before=before)
    require_same(weights, plain(face, name, thaw), name)


@pytest.mark.parametrize("forward", ["model.module", "a method"])
@pytest.mark.parametrize(("face", "name"), FEW)
def test_a_backward_that_raised_is_an_error_in_the_next_one_and_training_goes_on(face, name, forward):
    model = seeded(Net)
    optimizer = optimizer_of(face, name, model.parameters())
    script = Script(model, FACES[face](name, model, [optimizer]), optimizer)
    for step, batch in enumerate(inputs()):
        optimizer.zero_grad()
        hook = model.first[0].weight.register_hook(lambda _: 1 / 0) if step == 2 else None
        raises = {2: ZeroDivisionError, 3: gs.CommError}.get(step)
        if "bagua" in face and raises is gs.CommError:  # the model's own forward is the wrapper's
            raises = None
        if raises:
            with pytest.raises(raises):
                FORWARDS[forward](script, batch).backward()
        else:
            FORWARDS[forward](script, batch).backward()
            optimizer.step()
        if hook:
            hook.remove()
    require_promised(script.wrapped.own)


@pytest.mark.parametrize("forward", [*FORWARDS, "in a checkpoint", "the module in a checkpoint"])
@pytest.mark.parametrize("face", [face for face in FACES if face not in ("with_bagua", "fabric")])
def test_no_sync_keeps_the_gradients_of_every_forward(face, forward):
    def loss(script: Script, x: Tensor) -> Tensor:
        if forward in FORWARDS:
            return FORWARDS[forward](script, x)
        called = script.model if "module" in forward else script.wrapped.forward
        return checkpoint(called, x.clone().requires_grad_(), use_reentrant=True).square().mean()

    model, alone = seeded(Net), seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    script = Script(model, FACES[face]("gradient_allreduce", model, [optimizer]), optimizer)
    first, second, third = inputs()[:3]
    loss_of(script, first).backward()
    model.zero_grad()
    before = script.wrapped.own.engine.bytes_sent
    with script.wrapped.forward.no_sync():
        loss(script, second).backward()
    assert script.wrapped.own.engine.bytes_sent == before
    alone.loss(second).backward()
    torch.testing.assert_close(model.first[0].weight.grad, alone.first[0].weight.grad)
    loss(script, third).backward()
    alone.loss(third).backward()
    mean = torch.stack(every(alone.first[0].weight.grad)).mean(dim=0)
    torch.testing.assert_close(model.first[0].weight.grad, mean)


@pytest.mark.parametrize("face", FACES)
def test_a_parameter_that_a_forward_returns_gains_no_hooks(face):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(())), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.scale

    model = seeded(Scaled)
    wrapped = FACES[face]("gradient_allreduce", model, [torch.optim.SGD(model.parameters(), 0.1)])
    for batch in inputs():
        model.zero_grad()
        output, scale = wrapped.forward(batch)
        (output.square().mean() * scale).backward()
    if face != "fabric":  # whose own hooks look whether backward is its own
        assert not model.scale._backward_hooks
    assert all(torch.equal(each, model.scale.grad) for each in every(model.scale.grad))


@pytest.mark.skipif(not HAS_LIGHTNING, reason="needs lightning")
def test_fabrics_strategy_makes_the_ranks_equal():
    model, fabric = seeded(Net), fabric_of("decentralized")
    wrapped, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    with torch.no_grad():
        model.third.bias.fill_(gs.rank())
    fabric.strategy.consensus(wrapped)
    assert model.third.bias.tolist() == [1.0, 1.0]
    with pytest.raises(gs.ConfigError, match="needs a model that fabric.setup"):
        fabric.strategy.consensus(model)


# --- Lightning's Trainer, whose loop calls the script ---

HOOKED: dict[str, dict[str, Any]] = {
    "cloned": {"before": cloned},
    "cloned before the step": {"between": cloned},
    "swapped for a forward": {"before": MOVES["swapped for a forward"]},
    "a method": {"forward": FORWARDS["a method"]},
    "reentrant checkpoints": {"checkpoints": True},
    "thawed": {"before": thaws},
}


@pytest.mark.skipif(not HAS_LIGHTNING, reason="needs lightning")
@pytest.mark.parametrize("habit", HOOKED)
@pytest.mark.parametrize("name", NAMES.get("fabric", []))
def test_habits_in_the_hooks_of_a_lightning_module(name, habit):
    if habit == "thawed" and name in KEEPS_PLAN:
        with pytest.raises(
            gs.ConfigError, match="a parameter has become trainable since the model was wrapped"
        ):
            fit(name, **HOOKED[habit])
        return
    require_same(fit(name, **HOOKED[habit]), plain("DataParallel", name, habit == "thawed"), name)


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
@pytest.mark.parametrize(("face", "name"), CELLS)
def test_parameters_with_memory_in_common(face, name, how):
    model = seeded(lambda: Shared(how))
    refused = how in ("tied", "tied later", "a buffer") and "weight" in OURS[name]().fields

    def run() -> None:
        optimizer = optimizer_of(face, name, model.parameters())
        wrapped = FACES[face](name, model, [optimizer])
        for step, batch in enumerate(inputs()):
            if how == "tied later" and step == 1:
                model.decoder.weight.data = model.encoder.weight.data.t()
            optimizer.zero_grad()
            wrapped.forward(batch).square().mean().backward()
            optimizer.step()
        require_promised(wrapped.own)

    if refused:
        with pytest.raises(gs.ConfigError, match=r"'.*' and '.*' share memory"):
            run()
        return
    run()
    assert torch.equal(model.decoder.weight, model.encoder.weight.t()) == (how in ("tied", "tied later"))


# --- what a model may hold, and what it may lose ---


@pytest.mark.parametrize(("face", "name"), CELLS)
def test_consensus_leaves_what_has_no_mean(face, name):
    model = seeded(Net)
    held = {
        "integers": torch.arange(4),
        "bits": torch.ones(3, dtype=torch.bool),
        "eighths": torch.ones(4).to(torch.float8_e4m3fn),
    }
    for each, value in held.items():
        model.register_parameter(each, nn.Parameter(value, requires_grad=False))
        model.register_buffer(f"{each}_too", value.clone())
    optimizer = optimizer_of(face, name, [each for each in model.parameters() if each.requires_grad])
    own = FACES[face](name, model, [optimizer]).own
    with torch.no_grad():
        model.first[0].weight.add_(gs.rank())
    own.consensus()
    for each, value in held.items():
        assert torch.equal(getattr(model, each).float(), value.float())
    require_promised(own)


@pytest.mark.parametrize("change", ["pruned", "added", "removed"])
@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel"])
def test_a_state_is_loaded_after_the_model_has_changed(face, change):
    model = seeded(Net)
    wrapped = FACES[face]("gradient_allreduce", model, [torch.optim.SGD(model.parameters(), 0.1)]).forward
    inner = wrapped.module
    if change == "pruned":
        prune.l1_unstructured(model.first[0], "weight", amount=0.5)
    elif change == "added":
        model.extra = nn.Linear(2, 2)
    else:
        del model.frozen
        model.frozen = nn.Identity()
    state = copy.deepcopy(wrapped.state_dict())
    if change == "added":
        with pytest.raises(gs.ConfigError, match=r"parameter 'extra\.weight' is another object"):
            wrapped.load_state_dict(state)
        return
    wrapped.load_state_dict(state)
    wrapped(inputs()[0]).square().mean().backward()
    grads = torch.cat([param.grad.reshape(-1) for param in inner.parameters() if param.grad is not None])
    assert all(torch.equal(each, grads) for each in every(grads))
