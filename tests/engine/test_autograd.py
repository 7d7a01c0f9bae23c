"""Uses of autograd that are not one plain backward: checkpoints, autograd.grad, custom functions. Ranks are threads."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gossamer as gs
from tests.support.models import (
    batches,
    flat_grads,
    gradients,
    gradients_alone,
    mlp,
    relative_error,
    seeded,
    shard,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 5)

        def forward(self, x):
            x = checkpoint(self.middle, self.first(x), use_reentrant=use_reentrant)
            return self.last(torch.tanh(x))

    reference = gradients_alone(Checkpointed)
    for mine in run_ranks(2, lambda comm: gradients(comm, Checkpointed, lambda m, x, s: m(x))):
        for step, expected in zip(mine, reference, strict=True):
            for a, b in zip(step, expected, strict=True):
                torch.testing.assert_close(a, b)


def test_autograd_grad_communicates_nothing_and_a_gradient_penalty_trains():
    def body(comm, wrap=True):
        model = seeded(mlp)
        wrapped = gs.DataParallel(model, process_group=comm) if wrap else model
        x = (shard(batches(1)[0], comm) if wrap else batches(1)[0]).clone().requires_grad_()
        before = wrapped.engine.bytes_sent if wrap else 0
        (slope,) = torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)
        assert not wrap or wrapped.engine.bytes_sent == before
        assert model[0].weight.grad is None
        slope.square().sum(dim=1).mean().backward()
        return flat_grads(model)

    reference = body(None, wrap=False)
    for mine in run_ranks(2, body):
        assert relative_error(mine, reference) < 1e-6


def test_a_custom_function_that_returns_no_gradient_leaves_none():
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return None, grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.ignored = nn.Linear(10, 10), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return NoGradient.apply(self.ignored, self.used(x))

    for step in run_ranks(2, lambda comm: gradients(comm, Model, lambda m, x, s: m(x)))[0]:
        assert [grad is None for grad in step] == [True, False, False]


@dataclasses.dataclass
class Output:
    value: torch.Tensor


def test_reentrant_checkpoint_with_a_dataclass_output_synchronises_once():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 10)

        def forward(self, x):
            return Output(self.last(checkpoint(self.first, x, use_reentrant=True)))

    def body(comm):
        model = gs.DataParallel(seeded(Model), process_group=comm)
        for batch in batches(3):
            model(shard(batch, comm).requires_grad_()).value.sum().backward()
        return model.engine.backward_count

    assert run_ranks(2, body) == [3, 3]
