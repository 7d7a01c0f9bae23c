"""Small models, batches and a training loop that the engine's tests share. Not a test file."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gossamer as gs

ALGORITHMS = ["gradient_allreduce", "bytegrad", gs.GradientAllReduce(deterministic=True)]


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model whose parameters depend on `seed` alone, also when ranks are threads that share torch's generator."""
    model = build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 23), nn.Tanh(), nn.Linear(23, 7), nn.Tanh(), nn.Linear(7, 5))


def batches(steps: int, *, size: int = 12, width: int = 10, seed: int = 1) -> Tensor:
    """[steps, size, width]; 12 divides by 1, 2, 3 and 4 ranks."""
    return torch.randn(steps, size, width, generator=torch.Generator().manual_seed(seed))


def shard(batch: Tensor, comm: Any) -> Tensor:
    per_rank = batch.size(0) // comm.size
    return batch[comm.rank * per_rank : (comm.rank + 1) * per_rank]


def shards(steps: int, comm: Any) -> list[Tensor]:
    """This rank's part of each batch."""
    return [shard(batch, comm) for batch in batches(steps)]


class Leave(torch.autograd.Function):
    """Ends the process in backward, once the device has done what was queued before."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        getattr(torch, grad.device.type).synchronize()
        os._exit(0)


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().flatten() for param in model.parameters()])


def flat_grads(model: nn.Module) -> Tensor:
    return torch.cat(
        [param.grad.double().flatten() for param in model.parameters() if param.grad is not None]
    )


def square(x):
    return x.square().mean()


def trained(model, optimizer, inputs, *, loss=square, set_to_none=True) -> Tensor:
    """The weights as float64 after a step of the optimizer on each of the inputs."""
    for batch in inputs:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(model(batch)).backward()
        optimizer.step()
    return flat_weights(model)


def train(
    comm: Any,
    *,
    build: Callable[[], nn.Module] = mlp,
    steps: int = 10,
    wrap: bool = True,
    set_to_none: bool = True,
    **options: Any,
) -> Tensor:
    """SGD on the squared output of `build()`; returns the weights as float64. wrap=False trains alone."""
    options = copy.deepcopy(options)  # an algorithm object serves one model, and ranks are threads here
    model = seeded(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = gs.DataParallel(model, optimizer, process_group=comm, **options) if wrap else model
    trained(wrapped, optimizer, shards(steps, comm) if wrap else batches(steps), set_to_none=set_to_none)
    if wrap:
        wrapped.close()
    return flat_weights(model)


def relative_error(x: Tensor, reference: Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()


def gradients(comm, build, forward, algorithm="gradient_allreduce", *, steps=3, loss=square):
    """Per step, the gradients (None where there is none) after `forward(model, batch shard, step)`."""
    inner = seeded(build)
    model = gs.DataParallel(inner, algorithm=copy.deepcopy(algorithm), process_group=comm)
    seen = []
    for step, batch in enumerate(batches(steps)):
        inner.zero_grad()
        loss(forward(model, shard(batch, comm), step)).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in inner.parameters()])
    model.close()
    return seen


def join(gradients):
    return torch.cat([grad.double().flatten() for grad in gradients])


def gradients_alone(build, forward=lambda m, x, s: m(x), *, steps=3, loss=square):
    model = seeded(build)
    seen = []
    for step, batch in enumerate(batches(steps)):
        model.zero_grad()
        loss(forward(model, batch, step)).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return seen
