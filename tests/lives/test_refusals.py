"""What a wrapper that lives, or has ended, makes an error, on all ranks: gradients that nobody or two would average."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import gossamer as gs
import gossamer.horovod.torch as hvd
from tests.lives.faces import FACES, Wrapped, optimizer_of
from tests.lives.reference import (
    CELLS,
    alone,
    begin,
    closed,
    cycle,
    dropped,
    end,
    from_rank_0,
    inputs,
    lives,
    require_right,
    without_collector,
)
from tests.support.jobs import Job
from tests.support.models import mlp, seeded

pytestmark = pytest.mark.usefixtures("job")


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(3) as job, job.within(begin, end):
        yield job


# --- a graph whose wrapper has gone ---


def linear() -> nn.Linear:
    return nn.Linear(10, 5)  # whose backward does not need the weights, which wrapping writes


@pytest.mark.parametrize("ends", ["closed", "deleted"])
@pytest.mark.parametrize(
    "face", ["DataParallel", "DistributedDataParallel", "with_bagua", "bagua.DistributedDataParallel"]
)
def test_a_backward_whose_wrapper_has_ended_is_refused_and_one_whose_wrapper_was_replaced_is_averaged(
    face, ends
):
    model = seeded(linear)
    wrapped = FACES[face](model, "gradients")
    output = wrapped.forward(inputs(1, gs.rank())[0])
    if ends == "closed":
        wrapped.close()
    del wrapped
    if ends == "closed" or "bagua" not in face:  # there the model holds what was made
        with pytest.raises(gs.ConfigError, match="was closed or deleted before its backward"):
            output.square().mean().backward(retain_graph=True)
        assert all(param.grad is None for param in model.parameters())
    again = FACES[face](model, "gradients")
    output.square().mean().backward()
    expected = seeded(linear)
    expected(inputs(1)[0]).square().mean().backward()
    for param, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.grad, right.grad)
    del again


@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel"])
def test_a_wrapper_that_was_replaced_says_so(face):
    model = seeded(mlp)
    first = FACES[face](model, "gradients")
    second = FACES[face](model, "gradients")
    with pytest.raises(gs.ConfigError, match="this wrapper has ended: its model was wrapped again"):
        first.forward(inputs(1, gs.rank())[0])
    second.train(inputs(1, gs.rank()))


# --- stock DDP, made last: it ends no wrapper, so a gradient would be averaged by both ---


@pytest.mark.parametrize("life", [dropped, cycle, lives, closed])
@pytest.mark.parametrize(("face", "kind"), CELLS)
def test_stock_ddp_around_a_model_that_a_wrapper_has(face, kind, life):
    model, expected = seeded(mlp), seeded(mlp)
    with without_collector():
        kept = life(lambda: FACES[face](model, kind))
        alone(expected, face, kind, 1)
        from_rank_0(expected)
        optimizer = optimizer_of("torch", "gradients", model.parameters())
        stock = Wrapped(StockDDP(model), optimizer, None, lambda: None)
        # Bagua's model holds what was made. Horovod's optimizer cannot be closed.
        ended = [closed] if "bagua" in face else [dropped] if "hvd" in face else [closed, dropped]
        if life not in ended and kind not in ("weights", "peers"):
            # An optimizer of Horovod's that negotiates notices it by the second gradient without a step.
            with pytest.raises((gs.ConfigError, AssertionError), match="close|drop this optimizer"):
                stock.train(inputs(2, gs.rank()))
        else:
            stock.train(inputs(2, gs.rank()))
            alone(expected, "torch", "gradients", 2)
            require_right(model, expected)
    del kept


@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel", "with_bagua"])
def test_stock_ddp_trains_right_as_soon_as_the_wrapper_is_closed(face):
    model, expected = seeded(mlp), seeded(mlp)
    wrapped = FACES[face](model, "gradients")
    wrapped.train(inputs(1, gs.rank()))
    alone(expected, face, "gradients", 1)
    optimizer = optimizer_of("torch", "gradients", model.parameters())
    stock = Wrapped(StockDDP(model), optimizer, None, lambda: None)
    with pytest.raises(gs.ConfigError, match="in torch's DistributedDataParallel after Gossamer had it"):
        stock.train(inputs(2, gs.rank()))
    wrapped.close()
    stock.train(inputs(2, gs.rank()))
    alone(expected, "torch", "gradients", 2)
    require_right(model, expected)


# --- Horovod's optimizer ---


@pytest.mark.parametrize(("face", "kind"), [cell for cell in CELLS if "hvd" not in cell[0]])
def test_horovods_optimizer_for_a_part_of_a_model_that_is_wrapped(face, kind):
    model, expected = seeded(mlp), seeded(mlp)
    wrapped = FACES[face](model, kind)
    with pytest.raises(gs.ConfigError, match="belong to a model that is wrapped already, together with '4"):
        hvd.DistributedOptimizer(optimizer_of("hvd", "gradients", model[0].parameters()))
    wrapped.train(inputs(1, gs.rank()))
    alone(expected, face, kind, 1)
    require_right(model, expected)


@pytest.mark.parametrize("kind", ["gradients", "negotiated"])
@pytest.mark.parametrize("part", [False, True], ids=["the whole", "a part"])
@pytest.mark.parametrize("face", FACES)
def test_an_optimizer_of_horovods_whose_parameters_something_else_has(face, part, kind):
    """It ends, whatever is made after it, and its next step is an error. What was made last trains on."""
    model, expected = seeded(mlp), seeded(mlp)
    stale = FACES["hvd.DistributedOptimizer"](model, kind)
    stale.train(inputs(1, gs.rank()))
    alone(expected, "hvd", "gradients", 1)
    wrapped = FACES[face](model[0] if part else model, "gradients")
    with pytest.raises(
        gs.ConfigError, match="an optimizer or a wrapper that was made later has some of these"
    ):
        stale.optimizer.step()
    wrapped.train(inputs(2, gs.rank()), model[1:] if part else lambda output: output)
    alone(expected, face, "gradients", 2, part=part)
    require_right(model[0] if part else model, expected[0] if part else expected)
