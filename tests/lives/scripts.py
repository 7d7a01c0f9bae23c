"""A script that trains with habits of its own, by any face and algorithm. Not a test file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import gossamer as gs
from tests.lives.every import FACES, OURS, Wrapped, optimizer_of, trainer
from tests.support.models import flat_weights, seeded
from tests.support.promises import require_promised

STEPS = 6


class Net(nn.Module):
    """Three parts, each in a reentrant checkpoint if asked for, and a frozen one."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.third = nn.Linear(5, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.frozen(self.third(self.second(self.first(x))))
        x = x.clone().requires_grad_()
        for part in (self.first, self.second, self.third):
            x = checkpoint(part, x, use_reentrant=True)
        return self.frozen(x)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


@dataclass
class Script:
    """What a script holds: its model, the wrapper and the optimizer."""

    model: Net
    wrapped: Wrapped
    optimizer: torch.optim.Optimizer


def inputs() -> Tensor:
    """This rank's [STEPS, 4, 6]."""
    return torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(gs.rank()))


def every(x: Tensor) -> list[Tensor]:
    """The tensors of all ranks."""
    found = [torch.empty_like(x) for _ in range(gs.size())]
    dist.all_gather(found, x)
    return found


def loss_of(script: Script, x: Tensor) -> Tensor:
    """By the wrapper's own forward."""
    return script.wrapped.forward(x).square().mean()


def nothing(_step: int, _script: Script) -> None:
    pass


def train(
    face: str,
    name: str,
    forward: Callable[[Script, Tensor], Tensor] = loss_of,
    *,
    checkpoints: bool = False,
    before: Callable[[int, Script], Any] = nothing,
    between: Callable[[int, Script], Any] = nothing,
) -> Tensor:
    """The weights of this rank after the steps. `before` a step's forward, and `between` its backward and step()."""
    model = seeded(lambda: Net(checkpoints))
    optimizer = optimizer_of(face, name, model.parameters())
    wrapped = FACES[face](name, model, [optimizer])
    script = Script(model, wrapped, optimizer)
    for step, batch in enumerate(inputs()):
        before(step, script)
        optimizer.zero_grad()
        forward(script, batch).backward()
        between(step, script)
        optimizer.step()
    weights = flat_weights(model)
    assert wrapped.own.engine.backward_count == STEPS
    require_promised(wrapped.own)
    wrapped.own.close()
    return weights


def fit(
    name: str,
    forward: Callable[[Script, Tensor], Tensor] = loss_of,
    *,
    checkpoints: bool = False,
    before: Callable[[int, Script], Any] = nothing,
    between: Callable[[int, Script], Any] = nothing,
) -> Tensor:
    """As train(), in the hooks of a LightningModule, by a Trainer with our strategy."""
    import lightning.pytorch as pl

    from gossamer.lightning import GossamerStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = seeded(lambda: Net(checkpoints))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = optimizer_of("", name, self.model.parameters())
            self.script = Script(self.model, Wrapped(self.model, None), optimizer)
            return optimizer

        def on_train_batch_start(self, _batch: Tensor, number: int) -> None:
            before(number, self.script)

        def training_step(self, batch: Tensor, _number: int) -> Tensor:
            return forward(self.script, batch)

        def on_before_optimizer_step(self, _optimizer: torch.optim.Optimizer) -> None:
            between(self.trainer.global_step, self.script)

        def on_train_end(self) -> None:
            self.weights = flat_weights(self.model)
            wrapped = self.trainer.strategy.model
            assert wrapped.engine.backward_count == STEPS
            require_promised(wrapped)

    module = Module()
    trainer(GossamerStrategy(OURS[name]())).fit(module, DataLoader(list(inputs()), batch_size=None))  # type: ignore[arg-type]
    return module.weights
