# Measures the validation loss against the seconds of training, on one rank. Each variant trains by itself from the
# same seed, until it has the loss that stock DDP ends with. The clock stands still during a validation. lines.py
# makes results of the figures. worker.py calls it.
"""Time to a validation loss over a slow link."""

import copy
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gossamer import runtime
from gossamer.algorithms import AsyncModelAverage
from gossamer.bench.measuring import note
from gossamer.netlab.comparison.tasks import Task
from gossamer.netlab.comparison.variants import VARIANTS, Setting, Training, Variant

FIRST = "ddp"  # the others must reach the loss that it ends with
PATIENCE = 3  # a variant may take this many times the steps of stock DDP
_WARM_UP_SHARE = 0.1  # of the steps, for the learning rate
_EXACT_SHARE = 0.25  # of the steps, for QAdam and its kin


def measure(task: Task, job: dict[str, Any], setting: Setting, *, rows: int) -> list[dict[str, Any]]:
    """Returns a curve for each seed and variant, the same on every rank; rank 0's clock counts. Collective."""
    curves = []
    setting = replace(setting, warmup_steps=max(1, round(_EXACT_SHARE * job["steps"])))
    validator = Validator(task, job["weights"])
    for seed in job["seeds"]:
        target = None
        for name in job["algorithms"]:
            run = Run(task, name, setting, seed=seed, rows=rows, every=job["every"])
            curve = run.train(job["steps"], validator, target)
            curves.append({"algorithm": name, "seed": seed, **curve})
            if name == FIRST:
                target = curve["losses"][-1]
            if runtime.rank() == 0:
                end = f"{curve['losses'][-1]:.4f} after {curve['seconds'][-1]:.1f} s"
                note(f"seed {seed}, {name}: loss {end}, {curve['steps'][-1]} steps")
    return curves


class Run:
    """The training of one variant from one seed."""

    def __init__(self, task: Task, name: str, setting: Setting, *, seed: int, rows: int, every: int) -> None:
        torch.manual_seed(seed)
        self.variant: Variant = VARIANTS[name]
        self.task = task
        self.lr: float = setting.lr
        self.rows: int = rows
        self.seed: int = seed
        period = self.variant.period
        self.every: int = (
            -(-every // period) * period
        )  # whole periods, after which ranks hold the same weights
        self.training: Training = Training(task.model(), self.variant, setting)

    def train(self, steps: int, validator: "Validator", target: float | None) -> dict[str, Any]:
        """Trains to the end, or until the target is reached. Returns seconds, losses and steps at each validation."""
        seconds, losses, numbers = [0.0], [validator.loss(self)], [0]
        most = steps if target is None else PATIENCE * steps
        clock_s, step = 0.0, 0
        while step < most and (target is None or losses[-1] > target):
            upto = min(most, step + self.every + (self.variant.trial.offset if step == 0 else 0))
            dist.barrier()
            start_s = time.perf_counter()
            for number in range(step, upto):
                self._step(number, steps)
            clock_s += _slowest(time.perf_counter() - start_s)
            step = upto
            seconds.append(clock_s)
            losses.append(validator.loss(self))
            numbers.append(step)
        consensus_s = self._consensus() if self.variant.trial.apart else 0.0
        self.training.close()
        return {
            "seconds": seconds,
            "losses": losses,
            "steps": numbers,
            "consensus_s": consensus_s,
            "reached": target is None or losses[-1] <= target,
        }

    def _step(self, number: int, steps: int) -> None:
        warm = max(1, round(_WARM_UP_SHARE * steps))
        for group in self.training.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (number + 1) / warm)
        size, rank = runtime.size(), runtime.rank()
        batch = self.task.batch((self.seed << 32) + number, self.rows * size)
        self.training.step(*(part.chunk(size)[rank] for part in batch))

    def _consensus(self) -> float:
        """Returns the seconds of one exact mean. Ranks that are apart need it to get the model that was validated."""
        assert self.training.ours is not None
        start_s = time.perf_counter()
        self.training.ours.consensus()
        return _slowest(time.perf_counter() - start_s)


class Validator:
    """The loss of the mean of all ranks' weights, a share of the rows on each rank.

    Weights that differ go through a file, which all hosts of the lab can map: no link is used, and nothing changes.
    """

    def __init__(self, task: Task, file: str) -> None:
        self.task = task
        self.network: nn.Module = copy.deepcopy(task.model())
        count, size = sum(each.numel() for each in self.network.parameters()), runtime.size()
        dist.barrier()
        self.weights: torch.Tensor = torch.from_file(file, shared=True, size=size * count).view(size, count)

    def loss(self, run: Run) -> float:
        network: nn.Module = run.training.network
        algorithm = run.training.ours.algorithm if run.training.ours is not None else None
        if isinstance(algorithm, AsyncModelAverage):  # or it would average while the clock stands
            algorithm.abort()
        if run.variant.trial.apart:
            network = self._mean_of(network)
        size, rank = runtime.size(), runtime.rank()
        with torch.no_grad():
            share = [part.chunk(size)[rank] for part in self.task.validation]
            total = network(*share).double() * len(share[0])
        summed = torch.stack([total, torch.tensor(float(len(share[0])), dtype=torch.float64)])
        dist.all_reduce(summed)
        if isinstance(algorithm, AsyncModelAverage):
            algorithm.resume()
        return float(summed[0] / summed[1])

    def _mean_of(self, network: nn.Module) -> nn.Module:
        own = parameters_to_vector(network.parameters()).detach()
        self.weights[runtime.rank()].copy_(own)
        dist.barrier()
        mean: Tensor = self.weights.mean(dim=0)
        dist.barrier()  # none writes again while one reads
        vector_to_parameters(mean, self.network.parameters())
        return self.network


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
