"""A wrapped model and one step, for the tests of single algorithms. Not a test file."""

import torch

import gossamer as gs
from tests.support.models import mlp, seeded, square


def wrap(comm, algorithm, *, lr=0.1, seed=0, build=mlp, **options):
    module = seeded(build, seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm, **options), optimizer


def step(model, optimizer, batch):
    optimizer.zero_grad()
    square(model(batch)).backward()
    optimizer.step()
