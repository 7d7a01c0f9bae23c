"""Cases that other data-parallel libraries got wrong, one claim each. Ranks are threads."""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import ALGORITHMS, batches, gradients, gradients_alone, join, mlp, seeded, shard
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")


class RootOwned(nn.Module):
    """A parameter owned by the root module itself, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(10))
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x + self.shift))


class Branching(nn.Module):
    """Uses `always`, and `sometimes` only where asked; `never` never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x, use: bool = True):
        x = self.always(x)
        return self.sometimes(x) if use else x


class Mixed(nn.Module):
    """float32, bfloat16 and float64 parameters, an empty one and a one-element one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(10, 10)
        self.b = nn.Linear(10, 10, dtype=torch.bfloat16)
        self.c = nn.Linear(10, 10, dtype=torch.float64)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.c(self.b(self.a(x).bfloat16()).double()).float()
        return x * self.one + self.empty.sum()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("build", [RootOwned, Mixed])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradient_is_the_mean_over_ranks(algorithm, build, size):
    # Sums, because dividing by another batch size would round differently inside the bfloat16 layer.
    reference = gradients_alone(build, loss=torch.sum)
    for mine in run_ranks(
        size, lambda comm: gradients(comm, build, lambda m, x, s: m(x), algorithm, loss=torch.sum)
    ):
        for step, summed in zip(mine, reference, strict=True):
            expected = [grad / size for grad in summed]
            if algorithm == "bytegrad":
                step, expected = [join(step)], [join(expected)]
            for grad, mean in zip(step, expected, strict=True):
                lossy = grad.dtype == torch.bfloat16 or algorithm == "bytegrad"
                assert (grad - mean).double().norm() <= (0.03 if lossy else 1e-5) * mean.double().norm()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameter_that_no_rank_uses_keeps_no_gradient(size):
    forward = lambda model, x, step: model(x, use=step != 1)  # noqa: E731
    reference = gradients_alone(Branching, forward, steps=4)
    for mine in run_ranks(size, lambda comm: gradients(comm, Branching, forward, steps=4)):
        for step, step_reference in zip(mine, reference, strict=True):
            assert [g is None for g in step] == [g is None for g in step_reference]
            for grad, expected in zip(step, step_reference, strict=True):
                if grad is not None:
                    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_parameter_that_one_rank_uses_gets_the_mean_on_every_rank(size):
    def body(comm):
        return gradients(comm, Branching, lambda model, x, step: model(x, use=comm.rank == 1))

    results = run_ranks(size, body)
    for rank in range(size):
        for mine, first in zip(results[rank], results[0], strict=True):
            assert [g is None for g in mine] == [False, False, False, False, True, True]
            for grad, expected in zip(mine[:4], first[:4], strict=True):
                assert torch.equal(grad, expected)
    assert results[0][0][2].abs().sum() > 0


def test_frozen_parameter_stays_out_and_may_thaw_and_freeze_later():
    def body(comm, wrap=True):
        model = seeded(mlp)
        model[2].requires_grad_(False)
        wrapped = gs.DataParallel(model, process_group=comm) if wrap else model
        seen = []
        for step, batch in enumerate(batches(8)):
            model[2].requires_grad_(step in (2, 3, 6))
            model[4].requires_grad_(step != 5)
            model.zero_grad()
            wrapped(shard(batch, comm) if wrap else batch).square().mean().backward()
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        return seen

    reference = body(None, wrap=False)
    for mine in run_ranks(2, body):
        for step, expected in zip(mine, reference, strict=True):
            assert [g is None for g in step] == [g is None for g in expected]
            for a, b in zip(step, expected, strict=True):
                if a is not None:
                    torch.testing.assert_close(a, b)


def test_thawing_different_parameters_is_an_error_on_every_rank():
    def body(comm):
        model = seeded(mlp)
        model[2].requires_grad_(False)
        model[4].requires_grad_(False)
        wrapped = gs.DataParallel(model, process_group=comm)
        model[2 if comm.rank == 0 else 4].requires_grad_(True)
        wrapped(batches(1)[0]).sum().backward()

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "'2.weight is trainable now' on rank 0 and '4.weight is trainable now' on rank 1" in str(error)
