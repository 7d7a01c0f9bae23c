"""What scripts do with optimizers: made anew, split, idle, loaded, skipped by a GradScaler; by any face and algorithm.

Each cell trains as the same script does without the habit, or as one process, or is one ConfigError on all ranks.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from tests.lives.every import CELLS, FACES, LR, OWN_OPTIMIZER, optimizer_of
from tests.lives.scripts import STEPS, Net, every, inputs
from tests.support.jobs import Job
from tests.support.models import flat_weights, seeded
from tests.support.promises import require_promised

pytestmark = pytest.mark.usefixtures("job")
#: Whose ranks count steps alone: docs/training-step.md says that they cannot be used with a GradScaler.
SKIPS_ALONE = ("local_sgd", "local_sgd with delay", "diloco")
ANY_OPTIMIZER = [(face, name) for face, name in CELLS if name not in OWN_OPTIMIZER]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(3) as job, job.within(gs.init, gs.shutdown):
        yield job


class ByAnother(torch.optim.Optimizer):
    """As Lookahead: its step() calls another optimizer's."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, LR)
        super().__init__(self.inner.param_groups, {})

    def step(s, closure: Any = None) -> None:  # noqa: N805
        s.inner.step()


class Changes(torch.optim.SGD):
    """Calls its own class's step(), and then changes the weights in a way that does not commute with a mean."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, LR)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(param.sin() * 2)


class ChangesAfter(ByAnother):
    """The same, by another optimizer."""

    @torch.no_grad()
    def step(s, closure: Any = None) -> None:  # noqa: N805
        s.inner.step()
        for group in s.param_groups:
            for param in group["params"]:
                param.copy_(param.sin() * 2)


HABITS = ["anew each step", "two anew each step", "anew once", "one becomes two", "by another", "raised"]
IDLE = ["one stops", "one steps rarely"]


def train_by_optimizers(model: Net, habit: str, loss: Callable[[int], Tensor]) -> Iterator[Any]:
    """Yields the optimizers first. Then makes the steps."""

    def one() -> list[Any]:
        return [torch.optim.SGD(model.parameters(), LR)]

    def two() -> list[Any]:
        return [torch.optim.SGD(each, LR) for each in (model.first.parameters(), model.third.parameters())]

    optimizers = two() if habit in IDLE else one()
    if habit == "by another":
        optimizers = [ByAnother(list(model.parameters()))]
    yield optimizers
    for step in range(STEPS):
        if habit == "anew each step" or (habit == "anew once" and step == 3):
            optimizers = one()
        if habit == "two anew each step" or (habit == "one becomes two" and step == 3):
            optimizers = [torch.optim.SGD(each, LR) for each in halves(model)]
        if habit == "raised" and step == 3:
            with pytest.raises(TypeError):
                optimizers[0].step(closure=3)
        model.zero_grad()
        loss(step).backward()
        optimizers[0].step()
        rests = (habit == "one stops" and step >= 3) or (habit == "one steps rarely" and step % 3 != 2)
        for optimizer in optimizers[1:] if not rests else []:
            optimizer.step()


def halves(model: Net) -> tuple[list[Tensor], list[Tensor]]:
    first = list(model.first.parameters())
    return first, list(model.parameters())[len(first) :]


def train(face: str, name: str, habit: str) -> Tensor:
    model = seeded(Net)
    run = train_by_optimizers(model, habit, lambda step: wrapped.forward(inputs()[step]).square().mean())
    wrapped = FACES[face](name, model, next(run))
    list(run)
    weights = flat_weights(model)
    require_promised(wrapped.own)
    wrapped.own.close()
    return weights


@functools.cache
def plain(face: str, name: str) -> Tensor:
    """The weights of a script that makes one optimizer."""
    return train(face, name, "")


def alone(habit: str) -> Tensor:
    """The weights of one process that has the data of all ranks."""
    model, together = seeded(Net), every(inputs())
    list(
        train_by_optimizers(
            model, habit, lambda step: torch.stack([model.loss(each[step]) for each in together]).mean()
        )
    )
    return flat_weights(model)


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize(("face", "name"), ANY_OPTIMIZER)
def test_an_optimizer_that_is_made_anew_or_split_or_steps_by_another(face, name, habit):
    weights = train(face, name, habit)
    if name != "async":  # whose averages come when they come
        torch.testing.assert_close(weights, plain(face, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("habit", IDLE)
@pytest.mark.parametrize(("face", "name"), ANY_OPTIMIZER)
def test_one_of_two_optimizers_that_steps_seldom(face, name, habit):
    weights = train(face, name, habit)
    if name == "gradient_allreduce":
        torch.testing.assert_close(weights, alone(habit), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("habit", [*HABITS, *IDLE])
def test_local_sgd_averages_whatever_optimizer_steps(habit):
    """An averaging after each step is one process with all the data. An idle optimizer is noticed a step late."""
    model = seeded(Net)
    run = train_by_optimizers(model, habit, lambda step: wrapped(inputs()[step]).square().mean())
    wrapped = gs.DataParallel(model, optimizer=next(run), algorithm=gs.LocalSGD(1))
    list(run)
    weights = flat_weights(model)
    assert all(torch.equal(each, weights) for each in every(weights))
    late = 2e-3 if habit in IDLE else 1e-6
    torch.testing.assert_close(weights, alone(habit), rtol=1e-5, atol=late)


@pytest.mark.parametrize("given", ["the outer", "the inner", "both"])
@pytest.mark.parametrize("kind", [Changes, ChangesAfter])
@pytest.mark.parametrize("lockstep", [False, True])
def test_what_an_outer_optimizer_does_after_the_inner_one_is_averaged(kind, given, lockstep):
    model, expected = seeded(Net), seeded(Net)
    outer, alone = kind(list(model.parameters())), kind(list(expected.parameters()))
    inner = getattr(outer, "inner", outer)
    optimizers = {"the outer": [outer], "the inner": [inner], "both": [outer, inner]}[given]
    wrapped = gs.DataParallel(model, optimizer=optimizers, algorithm=gs.LocalSGD(1, lockstep=lockstep))
    for batch in inputs():
        for forward, optimizer in ((wrapped, outer), (expected, alone)):
            optimizer.zero_grad()
            forward(batch).square().mean().backward()
            optimizer.step()
        for param in expected.parameters():
            param.data = torch.stack(every(param.data)).mean(dim=0)
        torch.testing.assert_close(flat_weights(model), flat_weights(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rests", [range(2, 3), range(2, 5), range(1, STEPS, 2)], ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["the first", "the second"])
def test_steps_are_averaged_at_their_end_again_when_an_optimizer_comes_back(which, rests):
    model = seeded(Net)
    optimizers = [torch.optim.SGD(part.parameters(), LR) for part in (model.first, model.third)]
    wrapped = gs.DataParallel(model, optimizer=optimizers, algorithm=gs.LocalSGD(1, lockstep=True))
    for step in range(2 * STEPS):
        model.zero_grad()
        wrapped(inputs()[step % STEPS]).square().mean().backward()
        for number, optimizer in enumerate(optimizers):
            if number != which or step not in rests:
                optimizer.step()
        weights = flat_weights(model)
        equal = all(torch.equal(each, weights) for each in every(weights))
        assert equal or step in rests, step


@pytest.mark.parametrize(
    ("face", "name"), [cell for cell in CELLS if cell[0] in ("DataParallel", "with_bagua")]
)
def test_one_optimizer_steps_two_models(face, name):
    """Each is averaged in the order of wrapping, which is the same on all ranks."""

    def run() -> Tensor:
        first, second = seeded(Net), seeded(Net, 1)
        optimizer = optimizer_of(face, name, [*first.parameters(), *second.parameters()])
        owns = [FACES[face](name, each, [optimizer]) for each in (first, second)]
        for batch in inputs():
            optimizer.zero_grad()
            sum(each.forward(batch).square().mean() for each in owns).backward()
            optimizer.step()
        weights = torch.cat([flat_weights(first), flat_weights(second)])
        for each in owns:
            require_promised(each.own)
            each.own.close()
        return weights

    weights = run()
    if name != "async":
        torch.testing.assert_close(weights, run(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("face", "name"), [cell for cell in CELLS if cell not in ANY_OPTIMIZER])
def test_an_algorithm_with_an_optimizer_of_its_own_refuses_another_one(face, name):
    model = seeded(Net)
    wrapped = FACES[face](name, model, [optimizer_of(face, name, model.parameters())])
    wrapped.forward(inputs()[0]).square().mean().backward()
    with pytest.raises(gs.ConfigError, match="the model was wrapped with another optimizer than the SGD"):
        torch.optim.SGD(model.parameters(), LR).step()


@pytest.mark.parametrize(("face", "name"), CELLS)
def test_a_schedule_goes_on_after_the_optimizers_state_was_loaded(face, name):
    def run(*, load: bool) -> Tensor:
        model = seeded(Net)
        optimizer = optimizer_of(face, name, model.parameters())
        wrapped = FACES[face](name, model, [optimizer])
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
            wrapped.forward(batch).square().mean().backward()
            optimizer.step()
        weights = flat_weights(model)
        require_promised(wrapped.own)
        wrapped.own.close()
        return weights

    loaded = run(load=True)
    if name != "async":
        assert torch.equal(loaded, run(load=False))


@pytest.mark.parametrize(("face", "name"), [cell for cell in ANY_OPTIMIZER if cell[1] not in SKIPS_ALONE])
def test_an_infinite_gradient_of_one_of_two_optimizers(face, name):
    """On one rank. In lockstep a GradScaler skips that optimizer's step on all ranks, and the other one's on none."""
    model = seeded(Net)
    first, second = (torch.optim.SGD(part.parameters(), LR) for part in (model.first, model.third))
    wrapped = FACES[face](name, model, [first, second])
    lockstep = wrapped.own.engine.algorithm.lockstep
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    steps = {first: 0, second: 0}
    for optimizer in steps:
        optimizer.register_step_post_hook(lambda one, *_: steps.update({one: steps[one] + 1}))
    for step, batch in enumerate(inputs()):
        model.zero_grad()
        bad = step == 2 and gs.rank() == 1
        hook = model.first[0].bias.register_hook(lambda grad, bad=bad: grad / 0 if bad else grad)
        scaler.scale(wrapped.forward(batch).square().mean()).backward()
        hook.remove()
        for optimizer in steps:
            scaler.step(optimizer)
        scaler.update()
    skips = lockstep or gs.rank() == 1
    assert list(steps.values()) == [STEPS - skips, STEPS]
    require_promised(wrapped.own)
