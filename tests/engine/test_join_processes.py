"""Uneven inputs in real processes: torch's Join around gs.DataParallel, and the same weights as stock DDP's join."""

import pytest

from tests.support.ranks import run_job

JOB = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
import gossamer as gs

gs.init(backend=BACKEND)
rank, size = gs.rank(), gs.size()
epochs = [[1, 4, 2], [3, 0, 3], [2, 2, 2]]

def build(wrap):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.2)
    return inner, wrap(inner, optimizer), optimizer

def one_epoch(model, optimizer, epoch, count):
    for k in range(count):
        generator = torch.Generator().manual_seed(100 * epoch + 10 * k + rank)
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()

def train(wrap, around):
    inner, model, optimizer = build(wrap)
    for epoch, counts in enumerate(epochs):
        with around(model):
            one_epoch(model, optimizer, epoch, counts[rank])
    every = [torch.empty(0)] * size
    dist.all_gather_object(every, torch.cat([param.detach().flatten() for param in inner.parameters()]))
    assert all(torch.equal(every[0], other) for other in every)
    return every[0]

stock = lambda inner, _: DistributedDataParallel(inner)
ours = lambda inner, optimizer: gs.DataParallel(inner, optimizer)
results = {}
for divide in (True, False):
    expected = train(stock, lambda model: model.join(divide))
    own = train(ours, lambda model: model.join(divide))
    by_torch = train(ours, lambda model: Join([model], divide_by_initial_world_size=divide))
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(by_torch, expected, rtol=0, atol=1e-6)
    results[divide] = own
assert not torch.allclose(results[True], results[False])

# without the functionality, and with early termination: a RuntimeError on every rank, and training goes on
inner, model, optimizer = build(ours)
with Join([model], enable=False):
    one_epoch(model, optimizer, 0, 2)
try:
    with Join([model], throw_on_early_termination=True):
        one_epoch(model, optimizer, 1, 2 + rank)
except RuntimeError as error:
    assert "exhausted" in str(error), error
else:
    raise AssertionError("no early termination")
with model.join():
    one_epoch(model, optimizer, 2, 2 - rank % 2)
with model.join():
    one_epoch(model, optimizer, 3, 1)
model.close()

# a Join that was left, also one that an exception keeps alive on one rank, is over with the next backward
inner, model, optimizer = build(ours)
def sent():
    before = model.engine.bytes_sent
    one_epoch(model, optimizer, 4, 1)
    return model.engine.bytes_sent - before

one_epoch(model, optimizer, 0, 2)
usual = sent()
with Join([model]):
    assert sent() > usual  # the roll call
with Join([model], enable=False):
    assert sent() == usual
kept = []
for early in (True, False):
    try:
        with Join([model], throw_on_early_termination=early):
            one_epoch(model, optimizer, 1, 2 + rank * early)
            if not early:
                raise KeyError("of the loop")
    except (RuntimeError, KeyError) as error:
        kept += [error] * (rank == 0)
    one_epoch(model, optimizer, 2, 1)
    assert sent() == usual, (early, usual)
model.close()

# where nothing is to be done, no algorithm is refused
inner, model, optimizer = build(lambda inner, optimizer: gs.DataParallel(inner, optimizer, algorithm="powersgd"))
with Join([model], enable=False):
    one_epoch(model, optimizer, 0, 2)
try:
    Join([model])
except gs.ConfigError as error:
    assert "needs every rank in every step" in str(error), error
else:
    raise AssertionError("not refused")
model.close()

# two models side by side
first, other = build(ours), build(ours)
with Join([first[1], other[1]]):
    for k in range(1 + rank):
        one_epoch(*first[1:], k, 1)
        one_epoch(*other[1:], 10 + k, 1)
for inner, model, _ in (first, other):
    every = [None] * size
    dist.all_gather_object(every, inner[0].weight.detach().clone())
    assert all(torch.equal(every[0], weight) for weight in every)
    model.close()
gs.shutdown()
if rank == 0:
    print("all claims hold")
"""


@pytest.mark.parametrize("kind", ["gloo", "gossamer"])
def test_torchs_join_and_our_own_train_like_stock_ddp(kind, tmp_path):
    assert "all claims hold" in run_job(JOB.replace("BACKEND", repr(kind)), 3, tmp_path)
