"""Ranks with different numbers of batches, and one process that computes the expected result. Not a test file."""

import copy

import torch

import gossamer as gs
from tests.support.models import batches, flat_weights, mlp, seeded, square

EXACT = "gradient_allreduce"
DETERMINISTIC = gs.GradientAllReduce(deterministic=True)


def inputs(rank, count, epoch=0):
    """A rank's batches of an epoch; the first ones are the same whatever their number."""
    return [batches(1, size=6, seed=1000 * epoch + 100 * rank + k)[0] for k in range(count)]


def wrap(comm, algorithm=EXACT, *, build=mlp, seed=0, make=torch.optim.SGD, lr=0.1, **options):
    module = seeded(build, seed)
    optimizer = make(module.parameters(), lr=lr)
    algorithm = copy.deepcopy(algorithm)  # an object serves one model, and ranks are threads
    return gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm, **options), optimizer


def step(model, optimizer, *each):
    """One optimizer step on the mean gradient of some batches; all but the last are not sent."""
    optimizer.zero_grad()
    for number, batch in enumerate(each):
        if number + 1 < len(each):
            with model.no_sync():
                (square(model(batch)) / len(each)).backward()
        else:
            (square(model(batch)) / len(each)).backward()
    optimizer.step()


def alone(epochs, *, divide=True, build=mlp, micro=1, make=torch.optim.SGD, lr=0.1):
    """One process computes what the ranks should: a step's loss is the mean over all or active ranks."""
    model = seeded(build)
    optimizer = make(model.parameters(), lr=lr)
    for epoch, counts in enumerate(epochs):
        of_rank = [inputs(rank, micro * count, epoch) for rank, count in enumerate(counts)]
        for k in range(max(counts)):
            optimizer.zero_grad()
            active = [each[k * micro : (k + 1) * micro] for each in of_rank if len(each) > k * micro]
            divisor = (len(counts) if divide else len(active)) * micro
            sum(square(model(batch)) / divisor for each in active for batch in each).backward()
            optimizer.step()
    return flat_weights(model)


def all_equal(tensors):
    return all(torch.equal(tensors[0], other) for other in tensors)
