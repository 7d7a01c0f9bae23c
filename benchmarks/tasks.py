"""Two small trainings to compare algorithms by: a byte-level GPT on source text, a CNN on scikit-learn's digits.

Pure functions of a seed and a step, the same on every rank; nothing here knows of ranks. For trainings.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.workloads import source_text

CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """A model whose forward(*batch) is the mean loss, and what it trains on.

    `batch(seed)` is a global batch, which the ranks share out; `optimizer` makes one of parameters.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    validation: Batch
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    peak_lr: float
    adam_lr: float
    steps: int
    bucket_bytes: int  # such that there are several


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, fused=True)


class SmallGPT(nn.Module):
    """The demo's GPT with 2 layers of width 64, 135,000 parameters; forward(text[batch, context + 1])."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        self.register_buffer("later", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: Tensor) -> Tensor:
        x = self.byte(text[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x, src_mask=self.later, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer for 8 x 8 images, 10,000 parameters; forward(images, labels)."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.body = nn.Sequential(
            convolutions[0],
            nn.ReLU(),
            convolutions[1],
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(images), labels)


def text() -> Task:
    train, validation = source_text.standard_library()
    return Task(
        "GPT on text",
        SmallGPT,
        lambda seed: (source_text.batch(train, seed=seed, rows=32, context=CONTEXT),),
        (source_text.batch(validation, seed=0, rows=1024, context=CONTEXT),),
        adam,
        peak_lr=3e-3,
        adam_lr=3e-3,
        steps=240,
        bucket_bytes=1 << 17,
    )


def digits() -> Task:
    """Raises ImportError where scikit-learn is not installed."""
    from sklearn.datasets import load_digits

    read = load_digits()
    order = torch.randperm(len(read.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(read.images).float()[order, None] / 16
    labels = torch.from_numpy(read.target).long()[order]
    count = 900  # to train on; the other 897 validate

    def batch(seed: int) -> Batch:
        rows = torch.randint(count, (64,), generator=torch.Generator().manual_seed(seed))
        return images[rows], labels[rows]

    return Task(
        "CNN on digits",
        SmallCNN,
        batch,
        (images[count:], labels[count:]),
        lambda params: torch.optim.SGD(params, momentum=0.9),
        peak_lr=0.05,
        adam_lr=3e-3,
        steps=160,
        bucket_bytes=1 << 14,
    )


def learning_rate(peak: float, step: int, steps: int) -> float:
    """A linear warm-up over a twentieth of the steps, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))
