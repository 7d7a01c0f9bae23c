# Measures the time and the bytes of a step, on one rank. All variants train copies of a model in the same processes,
# in turns. Bytes are counted by Gossamer, and by the kernel on eth0. lines.py makes results of the figures. worker.py
# calls it.
"""Timing steps over a slow link."""

import contextlib
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gossamer import runtime
from gossamer.bench.measuring import note
from gossamer.netlab import DEVICE, Counters
from gossamer.netlab.comparison.tasks import Task
from gossamer.netlab.comparison.variants import PERIOD, VARIANTS, Setting, Training, Variant

ALONE = "alone, "  # before the optimizer's name: a step without communication
PER_TURN = 2
_PER_TURN_BY_CLOCK = 8 * PERIOD  # several rounds, because bytes are counted at the end of a round
COMPARED = ("ddp", "ddp_fp16_hook")  # the variants that the others are compared with
_TOGETHER = 5  # other variants in the same turns; the waiting threads of each slow all of them
_FIRST_STEPS = 3  # buckets are planned, warm-ups end, connections are up


@dataclass
class Turns:
    """The turns of one variant on one rank. Each figure is for one step."""

    seconds: list[float] = field(default_factory=list)
    bytes_counted: list[float] = field(default_factory=list)  # by Gossamer, on this rank
    bytes_of_kernel: list[float] = field(default_factory=list)  # on eth0 of this rank's host
    payload_of_kernel: list[float] = field(default_factory=list)  # less headers


class Timed:
    """A training whose steps are timed on this rank's rows of one batch."""

    def __init__(self, task: Task, name: str, setting: Setting, rows: int) -> None:
        torch.manual_seed(0)
        self.variant: Variant | None = None if name.startswith(ALONE) else VARIANTS[name]
        self.training: Training = Training(
            task.model(), self.variant, setting, alone=name.removeprefix(ALONE)
        )
        self.batch: list[torch.Tensor] = [
            part.chunk(runtime.size())[runtime.rank()] for part in task.batch(0, rows * runtime.size())
        ]
        self.turns: Turns = Turns()
        self.period: int = 1 if self.variant is None else self.variant.period
        self.steps: int = PER_TURN if self.period == 1 else self.period
        if self.variant is not None and self.variant.trial.by_clock:
            self.steps = _PER_TURN_BY_CLOCK

    def begin(self) -> None:
        """Takes the first steps, up to the middle of a period, so that no transfer lies between two turns."""
        for _ in range(_FIRST_STEPS if self.period == 1 else PERIOD // 2 - 1):
            self.training.step(*self.batch)

    def turn(self) -> None:
        if self.period == 1:  # not timed: the connections of this variant have been idle
            self.training.step(*self.batch)
        dist.barrier()
        counted, kernel = self.training.bytes_sent, Counters.read(DEVICE)
        start_s = time.perf_counter()
        for _ in range(self.steps):
            self.training.step(*self.batch)
        self.turns.seconds.append((time.perf_counter() - start_s) / self.steps)
        dist.barrier()
        went = Counters.read(DEVICE) - kernel
        self.turns.bytes_of_kernel.append(went.tx_bytes / self.steps)
        self.turns.payload_of_kernel.append(went.payload_sent / self.steps)
        if counted is not None:
            sent = self.training.bytes_sent
            assert sent is not None
            self.turns.bytes_counted.append((sent - counted) / self.steps)


def measure(
    task: Task, names: list[str], setting: Setting, *, rows: int, rounds: int
) -> list[dict[str, Any]]:
    """Returns the turns of every variant and of steps alone, on every rank. Collective; the same on all ranks.

    Some variants at a time take turns with each other and with the variants that they are compared with.
    """
    found = []
    for number, group in enumerate(_groups(names)):
        timed_alone = [name for name in group if not VARIANTS[name].trial.by_clock] if number else names
        alone = [ALONE + kind for kind in dict.fromkeys(VARIANTS[name].optimizer for name in timed_alone)]
        with contextlib.ExitStack() as stack:
            timed: dict[str, Timed] = {}
            for name in [*alone, *group]:
                timed[name] = Timed(task, name, setting, rows)
                stack.callback(timed[name].training.close)
                timed[name].begin()
                if runtime.rank() == 0:
                    note(f"ready: {name}")
            _rounds(timed, rounds)
            mine = {name: asdict(each.turns) for name, each in timed.items()}
        ranks: list[Any] = [None] * runtime.size()
        dist.all_gather_object(ranks, mine)
        found.append({name: [of[name] for of in ranks] for name in mine})
    return found


def _groups(names: list[str]) -> list[list[str]]:
    compared = [name for name in names if name in COMPARED]
    restless = [name for name in names if VARIANTS[name].trial.by_clock]
    others = [name for name in names if name not in [*compared, *restless]]
    count = max(1, math.ceil(len(others) / _TOGETHER))
    ends = [len(others) * number // count for number in range(count + 1)]
    parts = [others[begin:end] for begin, end in itertools.pairwise(ends)]
    alone = [[name] for name in restless]  # it would slow the turns of others
    return [[*compared, *part] for part in parts] + alone


def _rounds(timed: Mapping[str, Timed], rounds: int) -> None:
    names = list(timed)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            timed[name].turn()
        if runtime.rank() == 0:
            note(f"round {turn + 1} of {rounds}: {', '.join(names)}")
