"""QAdam, 1-bit Adam and 0/1 Adam do not diverge where the variance that they keep is close to zero."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gossamer as gs
from tests.support.models import seeded
from tests.support.ranks import run_ranks

LR, WARMUP, LIMIT = 0.01, 5, 0.1 / 0.001**0.5  # in lr, for Adam's usual betas


def moves(optimizer, param, gradients):
    """What each step adds to the parameter."""
    for gradient in gradients:
        before = param.detach().clone()
        param.grad = gradient.clone()
        optimizer.step()
        yield param.detach() - before


@pytest.mark.parametrize("kind", [gs.QAdamOptimizer, gs.ZeroOneAdamOptimizer], ids=lambda kind: kind.__name__)
def test_an_element_that_the_warmup_hardly_saw_moves_no_further_than_adam_can_move_it(kind):
    param = nn.Parameter(torch.zeros(3))
    asleep, awake = torch.tensor([1.0, 1e-12, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    steps = list(moves(kind([param], LR, WARMUP), param, [asleep] * WARMUP + [awake] * 20))
    frozen = torch.stack(steps[WARMUP:])
    assert frozen.abs().max() <= 1.0001 * LIMIT * LR
    assert torch.allclose(frozen[:, 0], torch.full((20,), -LR), rtol=1e-3)  # of the warm-up's gradients
    assert torch.allclose(frozen[-1, 1], torch.tensor(-LIMIT * LR))
    # 0/1 Adam does not move elements without any variance.
    assert torch.allclose(frozen[-1, 2], torch.tensor(-LIMIT * LR if kind is gs.QAdamOptimizer else 0.0))


class Small(nn.Module):
    """Its many units see images that are mostly zeros: some get their first gradient late."""

    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        convolutions = first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        self.body = nn.Sequential(*convolutions, nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images, labels):
        return F.cross_entropy(self.body(images), labels)


def images(seed, rows):
    """Ten shapes, each with noise where it is not zero."""
    shapes = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(1)).relu()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (rows,), generator=generator)
    return shapes[labels] * torch.rand(rows, 1, 8, 8, generator=generator), labels


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (gs.QAdam, gs.QAdamOptimizer),
        (gs.OneBitAdam, gs.QAdamOptimizer),
        (gs.ZeroOneAdam, gs.ZeroOneAdamOptimizer),
    ],
    ids=["qadam", "onebit_adam", "zero_one_adam"],
)
def test_a_cnn_learns_after_a_warmup_of_20_steps(algorithm, optimizer):
    def body(comm):
        module = seeded(Small)
        steps = optimizer(module.parameters(), 3e-3, 20)
        model = gs.DataParallel(module, steps, algorithm=algorithm(), process_group=comm)
        for step in range(80):
            batch = images(step, 16)
            loss = model(*(part.chunk(comm.size)[comm.rank] for part in batch))
            steps.zero_grad()
            loss.backward()
            steps.step()
        model.close()
        with torch.no_grad():
            return module(*images(1000, 256)).item()

    for loss in run_ranks(2, body):
        assert loss < 2.0  # 6.7 before training
