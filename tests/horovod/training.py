"""Small models for the checks of the Horovod optimizer, and the gradients of each rank. Not a check file.

Every rank can compute the gradients of all ranks, so results are compared with a loop in one process.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gossamer.horovod.torch as hvd
from gossamer.horovod.torch.compression import NoneCompressor
from tests.horovod.sets import mine
from tests.support.models import mlp, seeded


class Own(NoneCompressor):
    """A script's own compression, which only negotiated operations can call."""


WAYS = {"engine": hvd.Compression.none, "negotiated": Own}


def ways() -> Iterator[tuple[Any, int, int, str, Any]]:
    """(process set, rank in it, its size, way, compression) for sets with more than one rank."""
    for process_set, rank, size in mine():
        if size > 1:
            for way, compression in WAYS.items():
                yield process_set, rank, size, way, compression


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def wrapped(
    model: nn.Module, process_set: Any, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Any:
    """A DistributedOptimizer of the model."""
    optimizer = sgd(model) if optimizer is None else optimizer
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=process_set, **options)


def gradients_of(
    model: nn.Module, loss: Callable[..., Tensor], ranks: int, *arguments: Any
) -> list[list[Tensor | None]]:
    """Each rank's gradients of loss(model, rank, *arguments), computed without a backward, so that no hook runs."""
    params = [param for param in model.parameters() if param.requires_grad]
    every = []
    for rank in range(ranks):
        found = iter(torch.autograd.grad(loss(model, rank, *arguments), params, allow_unused=True))
        every.append([next(found) if param.requires_grad else None for param in model.parameters()])
    return every


def _loss_of_passes(model: nn.Module, rank: int, step: int, passes: int) -> Tensor:
    return sum(loss_of(model, rank, step * passes + number) for number in range(passes))


def reference(size: int, *, steps: int = 3, factor: float | None = None, passes: int = 1) -> nn.Module:
    """The model after SGD steps by the sum of the ranks' gradients times `factor`, 1 / size by default."""
    model = seeded(mlp)
    optimizer = sgd(model)
    for step in range(steps):
        every = gradients_of(model, _loss_of_passes, size, step, passes)
        for param, *grads in zip(model.parameters(), *every, strict=True):
            total = grads[0].clone()
            for grad in grads[1:]:
                total += grad
            param.grad = total * (1 / size if factor is None else factor)
        optimizer.step()
    return model


def train_over(process_set: Any, rank: int, *, steps: int = 3, **options: Any) -> tuple[nn.Module, Any]:
    """A model and its optimizer, after steps over the process set."""
    model = seeded(mlp)
    optimizer = wrapped(model, process_set, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return model, optimizer


def close(model: nn.Module, want: nn.Module, case: object, *, exact: bool, tolerance: float = 1e-5) -> None:
    for (name, got), param in zip(model.named_parameters(), want.parameters(), strict=True):
        equal = (
            torch.equal(got, param) if exact else torch.allclose(got, param, rtol=tolerance, atol=tolerance)
        )
        assert equal, f"{case}: {name} is off by {(got - param).abs().max()}"
