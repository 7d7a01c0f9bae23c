"""One training of a task of tasks.py on ranks that are threads over Gloo, for the benchmarks that compare losses.

Runs of one seed begin alike and see the same batches, so a ratio compares runs of one seed.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tasks
import torch
from harness import paired, report, run_threads
from torch import nn

import gossamer as gs

RANKS = 4
Optimizers = Callable[[tasks.Task, nn.Module, int], Sequence[Any]]


def of_the_task(task: tasks.Task, model: nn.Module, _steps: int) -> list[Any]:
    return [with_peak(task.optimizer(list(model.parameters())), task.peak_lr)]


def with_peak(optimizer: Any, peak: float) -> Any:
    """The optimizer, with the learning rate from which each step's is made."""
    for group in optimizer.param_groups:
        group["peak_lr"] = peak
    return optimizer


@dataclass(frozen=True)
class Case:
    """An algorithm, and the optimizers that it trains with: `optimizers(task, model, steps)`, made by with_peak()."""

    name: str
    algorithm: Callable[[], gs.Algorithm]
    at_most: float | None = None
    optimizers: Optimizers = field(default=of_the_task)


@dataclass(frozen=True)
class Trained:
    """The validation loss of rank 0, and of the ranks the most optimizer state and the mean of what was sent a step."""

    loss: float
    state_bytes: int
    sent_bytes: float


def train(task: tasks.Task, case: Case, seed: int, steps: int, ranks: int = RANKS) -> Trained:
    """Trains for `steps` steps on every rank. The loss is that after model.consensus()."""
    torch.manual_seed(seed)
    start = task.model()

    def body(comm: Any, _backend: Any) -> Trained:
        model = copy.deepcopy(start)
        optimizers = case.optimizers(task, model, steps)
        sizes = {"bucket_bytes": task.bucket_bytes, "first_bucket_bytes": task.bucket_bytes}
        wrapped = gs.DataParallel(model, optimizers, algorithm=case.algorithm(), process_group=comm, **sizes)
        sent = 0
        for step in range(steps):
            if step == 2:  # the plan of the buckets has settled
                sent = wrapped.engine.bytes_sent
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = tasks.learning_rate(group["peak_lr"], step, steps)
                optimizer.zero_grad()
            batch = [part.chunk(ranks)[comm.rank] for part in task.batch((seed << 32) + step)]
            wrapped(*batch).backward()
            for optimizer in optimizers:
                optimizer.step()
        sent_bytes = (wrapped.engine.bytes_sent - sent) / max(1, steps - 2)
        states = [each for own in optimizers for of_one in own.state.values() for each in of_one.values()]
        kept = sum(each.nbytes for each in states if isinstance(each, torch.Tensor) and each.dim() > 0)
        wrapped.consensus()
        wrapped.close()
        with torch.no_grad():
            return Trained(model(*task.validation).item() if comm.rank == 0 else 0.0, kept, sent_bytes)

    results = run_threads(ranks, body)
    state_bytes = max(each.state_bytes for each in results)
    return Trained(results[0].loss, state_bytes, sum(each.sent_bytes for each in results) / ranks)


def report_losses(
    name: str,
    task: tasks.Task,
    steps: int,
    losses: Sequence[float],
    peer: tuple[str, Sequence[float]],
    at_most: float | None,
    ranks: int = RANKS,
    **fields: Any,
) -> None:
    """Prints the losses of some seeds beside those of a peer, a name and losses. Their median ratio is judged."""
    ratios = paired(losses, peer[1])
    report(
        f"validation loss of {name}, {task.name}, {ranks} ranks, {steps} steps",
        statistics.median(losses),
        "nats",
        baseline=(peer[0], statistics.median(peer[1])),
        ratio=statistics.median(ratios),
        at_most=at_most,
        target_of="ratio",
        samples=losses,
        ratios=[round(ratio, 4) for ratio in ratios],
        **fields,
    )


def final_loss(task: tasks.Task, case: Case, seed: int, steps: int, ranks: int = RANKS) -> float:
    return train(task, case, seed, steps, ranks).loss
