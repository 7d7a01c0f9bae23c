# What `gossamer bench network` trains: a GPT larger than the demo's, and a CNN on scikit-learn's digits. All are
# functions of a seed and give the same on every rank. steps.py and loss.py call it.
"""The two trainings over slow links."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import ConfigError
from gossamer.workloads import source_text
from gossamer.workloads.gpt import GPT

Batch = tuple[Tensor, ...]
_CONTEXT = 16  # bytes of text in a row: a step takes a core 12 ms, and all hosts share this machine's cores
_VALIDATION_ROWS = 512


@dataclass(frozen=True)
class Task:
    """A model whose forward(*batch) is the mean loss, and what it trains on.

    batch(seed, rows) is a global batch, of which each rank takes its part. `rows` is the default for one rank.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    validation: Batch
    rows: int
    lr: float


class CNN(nn.Module):
    """Two convolutions and two linear layers for 8 x 8 images, 283,658 parameters; forward(images, labels)."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        convolutions = first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        self.body: nn.Module = nn.Sequential(
            *convolutions, nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(images), labels)


def gpt() -> Task:
    """Returns a GPT of 2.5 million parameters in 3 large layers: a step computes little for the bytes that it sends."""
    train, validation = source_text.standard_library()
    return Task(
        "gpt",
        lambda: GPT(context=_CONTEXT, width=256, heads=4, layers=3),
        lambda seed, rows: (source_text.batch(train, seed=seed, rows=rows, context=_CONTEXT),),
        (source_text.batch(validation, seed=0, rows=_VALIDATION_ROWS, context=_CONTEXT),),
        rows=1,
        lr=1e-3,
    )


def cnn() -> Task:
    """Returns the CNN on digits. Raises ConfigError if scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("--model cnn: its digits need scikit-learn; pip install scikit-learn") from None
    read = load_digits()
    order = torch.randperm(len(read.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(read.images).float()[order, None] / 16
    labels = torch.from_numpy(read.target).long()[order]
    count = 900  # images to train on; the other 897 validate

    def batch(seed: int, rows: int) -> Batch:
        chosen = torch.randint(count, (rows,), generator=torch.Generator().manual_seed(seed))
        return images[chosen], labels[chosen]

    return Task("cnn", CNN, batch, (images[count:], labels[count:]), rows=8, lr=1e-3)


TASKS: dict[str, Callable[[], Task]] = {"gpt": gpt, "cnn": cnn}
