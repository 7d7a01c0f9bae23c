"""Uneven inputs in a job of three processes: torch's Join, and our own, give the weights of stock DDP's join."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from tests.support.jobs import Job

pytestmark = pytest.mark.usefixtures("job")

EPOCHS = [[1, 4, 2], [3, 0, 3], [2, 2, 2]]  # steps of each rank


@pytest.fixture(scope="module", params=["gloo", "gossamer"])
def job(request):
    with Job(3) as job, job.within(gs.init, gs.shutdown, backend=request.param):
        yield job


def stock(inner, _):
    return DistributedDataParallel(inner)


def ours(inner, optimizer):
    return gs.DataParallel(inner, optimizer)


def build(wrap):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.2)
    return inner, wrap(inner, optimizer), optimizer


def one_epoch(model, optimizer, epoch, count):
    for k in range(count):
        generator = torch.Generator().manual_seed(100 * epoch + 10 * k + gs.rank())
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def equal_on_all_ranks(tensor):
    every = [None] * gs.size()
    dist.all_gather_object(every, tensor)
    return all(torch.equal(every[0], other) for other in every)


def train(wrap, around):
    inner, model, optimizer = build(wrap)
    for epoch, counts in enumerate(EPOCHS):
        with around(model):
            one_epoch(model, optimizer, epoch, counts[gs.rank()])
    weights = torch.cat([param.detach().flatten() for param in inner.parameters()])
    assert equal_on_all_ranks(weights)
    return weights


def test_torchs_join_and_our_own_train_like_stock_ddp():
    results = []
    for divide in (True, False):

        def own(model, divide=divide):
            return model.join(divide)

        def by_torch(model, divide=divide):
            return Join([model], divide_by_initial_world_size=divide)

        expected = train(stock, own)
        results.append(train(ours, own))
        torch.testing.assert_close(results[-1], expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(train(ours, by_torch), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(*results)


def test_after_an_early_termination_on_every_rank_training_goes_on():
    _, model, optimizer = build(ours)
    with Join([model], enable=False):
        one_epoch(model, optimizer, 0, 2)
    with (
        pytest.raises(RuntimeError, match="exhausted"),
        Join([model], throw_on_early_termination=True),
    ):
        one_epoch(model, optimizer, 1, 2 + gs.rank())
    with model.join():
        one_epoch(model, optimizer, 2, 2 - gs.rank() % 2)
    with model.join():
        one_epoch(model, optimizer, 3, 1)
    model.close()


def test_a_join_that_was_left_is_over_with_the_next_backward():
    """Also where an exception keeps the Join alive on one rank."""
    _, model, optimizer = build(ours)

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
                one_epoch(model, optimizer, 1, 2 + gs.rank() * early)
                if not early:
                    raise KeyError("of the loop")
        except (RuntimeError, KeyError) as error:
            kept += [error] * (gs.rank() == 0)
        one_epoch(model, optimizer, 2, 1)
        assert sent() == usual, (early, usual)
    model.close()


def test_an_algorithm_that_cannot_join_is_refused_only_where_the_join_is_enabled():
    _, model, optimizer = build(
        lambda inner, optimizer: gs.DataParallel(inner, optimizer, algorithm="powersgd")
    )
    with Join([model], enable=False):
        one_epoch(model, optimizer, 0, 2)
    with pytest.raises(gs.ConfigError, match="needs every rank in every step"):
        Join([model])
    model.close()


def test_two_models_join_side_by_side():
    first, other = build(ours), build(ours)
    with Join([first[1], other[1]]):
        for k in range(1 + gs.rank()):
            one_epoch(*first[1:], k, 1)
            one_epoch(*other[1:], 10 + k, 1)
    for inner, model, _ in (first, other):
        assert equal_on_all_ranks(inner[0].weight.detach().clone())
        model.close()
