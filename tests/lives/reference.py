"""For the table of lives: how a wrapper ends, and what one process does that has all the data. Not a test file.

A cell is a function of a job whose ranks have a default group. What ends a wrapper in a user's program, and when, is up
to references, tracebacks, cycles and the collector, which may differ between ranks.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer as gs
import gossamer.horovod.torch as hvd
from tests.lives.faces import FACES, KINDS, Wrapped, optimizer_of
from tests.support.models import batches, flat_weights

STEPS = 3


def begin() -> None:
    gs.init()
    hvd.init(process_sets="dynamic")
    gc.collect()
    gc.freeze()  # cells collect often; what the imports have left need not be looked at each time


def end() -> None:
    hvd.shutdown()
    gs.shutdown()


# --- the reference ---


def inputs(phase: int, rank: int | None = None) -> Tensor:
    """The batches of the first or second wrapper; those of one rank."""
    every = batches(STEPS, seed=phase)
    return every if rank is None else every.chunk(gs.size(), dim=1)[rank]


def alone(model: nn.Sequential, face: str, kind: str, phase: int, *, part: bool = False) -> None:
    """What one process does that has all the data; for peers, what ranks do together, each as a copy of the model."""
    if kind != "peers":
        optimizer = optimizer_of(face, kind, (model[0] if part else model).parameters())
        for batch in inputs(phase):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return
    copies = [copy.deepcopy(model) for _ in range(gs.size())]
    optimizers = [optimizer_of(face, kind, (each[0] if part else each).parameters()) for each in copies]
    for step in range(STEPS):
        before = torch.stack([flat_weights(each) for each in copies])
        mean = before.mean(dim=0)
        for rank, (each, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            optimizer.zero_grad()
            each(inputs(phase, rank)[step]).square().mean().backward()
            nn.utils.vector_to_parameters(mean.float(), each.parameters())
            optimizer.step()
    nn.utils.vector_to_parameters(flat_weights(copies[gs.rank()]).float(), model.parameters())


def require_right(model: nn.Module, expected: nn.Module) -> None:
    """On this rank. All ranks call it, so all of them have gone on."""
    torch.testing.assert_close(flat_weights(model), flat_weights(expected), rtol=1e-4, atol=1e-6)


def from_rank_0(model: nn.Module) -> None:
    """Makes the weights of a model equal on all ranks, as wrapping does."""
    for param in model.parameters():
        dist.broadcast(param.data, 0)


# --- how the first wrapper ends ---


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """It might end the first wrapper, on one rank and not on another."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class OnPurposeError(Exception):
    pass


def dropped(wrap: Callable[[], Wrapped]) -> None:
    wrap().train(inputs(1, gs.rank()))


def kept_losses(wrap: Callable[[], Wrapped]) -> Any:
    return [loss for _, loss in wrap().train(inputs(1, gs.rank()))]


def kept_outputs(wrap: Callable[[], Wrapped]) -> Any:
    return [output for output, _ in wrap().train(inputs(1, gs.rank()))]


def traceback(wrap: Callable[[], Wrapped]) -> Any:
    def raises() -> None:
        wrapped = wrap()
        wrapped.train(inputs(1, gs.rank()))
        raise OnPurposeError

    try:
        raises()
    except OnPurposeError as error:
        return error


def cycle(wrap: Callable[[], Wrapped]) -> None:
    wrapped: Any = wrap()
    wrapped.train(inputs(1, gs.rank()))
    wrapped.itself = wrapped


def lives(wrap: Callable[[], Wrapped]) -> Any:
    wrapped = wrap()
    wrapped.train(inputs(1, gs.rank()))
    return wrapped


def lives_on_rank_0(wrap: Callable[[], Wrapped]) -> Any:
    return lives(wrap) if gs.rank() == 0 else dropped(wrap)


def dropped_on_rank_0(wrap: Callable[[], Wrapped]) -> Any:
    return lives(wrap) if gs.rank() != 0 else dropped(wrap)


def closed(wrap: Callable[[], Wrapped]) -> Any:
    wrapped = lives(wrap)
    wrapped.close()
    return wrapped


def closed_and_dropped(wrap: Callable[[], Wrapped]) -> None:
    closed(wrap)


LIVES = [
    dropped,
    kept_losses,
    kept_outputs,
    traceback,
    cycle,
    lives,
    lives_on_rank_0,
    dropped_on_rank_0,
    closed,
    closed_and_dropped,
]
FEW = [cycle, lives, dropped_on_rank_0]
CELLS = [(face, kind) for face in FACES for kind in KINDS[face]]
