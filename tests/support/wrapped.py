"""A wrapped model and one step, for the tests of single algorithms. Not a test file."""

import torch

import gossamer as gs
from tests.support.models import mlp, seeded, square


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr=lr)


def wrap(comm, algorithm, *, lr=0.1, seed=0, build=mlp, inner=sgd, **options):
    """`inner` makes the optimizer of a module, or a list of them."""
    module = seeded(build, seed)
    optimizer = inner(module, lr)
    return gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm, **options), optimizer


def step(model, optimizers, batch):
    """`optimizers`: one, or a list of them."""
    own = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in own:
        optimizer.zero_grad()
    square(model(batch)).backward()
    for optimizer in own:
        optimizer.step()
