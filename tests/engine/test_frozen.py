"""A wrapped model all of whose parameters are frozen, through which another model's gradients pass, as in a GAN."""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.lives.every import OURS
from tests.support.models import flat_weights, seeded
from tests.support.promises import require_promised
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")
STEPS = 4
NAMES = ["gradient_allreduce", "int4", "powersgd", "decentralized", "local_sgd"]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(comm, name, *, freeze, trains_generator=True):
    """A GAN's turns. Returns the weights of the discriminator, and the bytes that its wrapper has sent."""
    generator, judge = (
        seeded(lambda: nn.Linear(3, 4)),
        seeded(lambda: nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1))),
    )
    optimizers = sgd(generator), sgd(judge)
    judged = gs.DataParallel(judge, optimizers[1], algorithm=OURS[name](), process_group=comm)
    before = judged.engine.bytes_sent  # of the group
    noise = torch.randn(STEPS, 5, 3, generator=torch.Generator().manual_seed(comm.rank))
    for step, batch in enumerate(noise):
        fake = generator(batch)
        optimizers[1].zero_grad()
        judged(fake.detach()).square().mean().backward()
        optimizers[1].step()
        if trains_generator:
            judge.requires_grad_(not freeze(step))
            optimizers[0].zero_grad()
            judged(fake).mean().neg().backward()
            if comm.rank == 0:  # alike on all ranks, without a wrapper of its own
                assert generator.weight.grad.abs().sum() > 0
            judge.requires_grad_()
    require_promised(judged)
    sent = judged.engine.bytes_sent - before
    assert judged.engine.backward_count == (STEPS if freeze(0) or not trains_generator else 2 * STEPS)
    judged.close()
    return flat_weights(judge), sent


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_pass_through_send_nothing_and_change_nothing(name):
    def body(comm):
        return [train(comm, name, freeze=lambda _: True, trains_generator=trains) for trains in (True, False)]

    for (weights, sent), (expected, expected_sent) in run_ranks(3, body):
        assert torch.equal(weights, expected)
        if name != "decentralized":  # whose next average begins in a forward
            assert sent == expected_sent


def test_ranks_that_do_not_freeze_alike_all_raise():
    def body(comm):
        train(comm, "gradient_allreduce", freeze=lambda step: comm.rank == 0 or step != 1)

    for error in run_ranks(3, body, errors=True):
        assert isinstance(error, gs.CommError)
        assert (
            "different numbers of optimizer steps; rank 0: 2 and 2 backwards while every parameter was frozen"
            in str(error)
        )


def test_a_model_that_is_frozen_between_its_forward_and_its_backward_gets_no_gradients():
    def body(comm):
        model = seeded(lambda: nn.Linear(4, 2))
        wrapped = gs.DataParallel(model, process_group=comm)
        batch = torch.ones(1, 4, requires_grad=True)
        loss = wrapped(batch).sum()
        model.requires_grad_(False)
        loss.backward()
        assert model.weight.grad is None
        assert batch.grad is not None
        model.requires_grad_()
        (wrapped(batch).sum() * (comm.rank + 1)).backward()
        return model.weight.grad

    for grad in run_ranks(3, body):
        assert torch.equal(grad, torch.full((2, 4), 2.0))
