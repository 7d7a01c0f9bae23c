"""The share of stock DDP's training step that is visible communication: our backend against Gloo on one host.

Every process trains copies of the demo's GPT, in turns: bare (the floor: the same step, all processes at once,
without communication), under DDP whose buckets are declared reduced without being sent (the cost of DDP itself), and
under DDP on each backend. One thread each; a step counts on the slowest rank. Exposed communication is the step less
the floor of the same turn. The backends' gradients are compared first.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    arguments,
    interleaved,
    paired,
    report_against,
    rows_of,
    run_processes,
    serve,
    slowest,
    spread,
)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from gossamer.workloads.gpt import CONTEXT, GPT

FLOOR, SILENT, OURS, GLOO = "bare module", "DDP, nothing sent", "DDP on ours", "DDP on Gloo"
TARGET = 1.03  # times the floor, with 2 processes: communication is not visible


def nothing_sent(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that returns the bucket unchanged, at once."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Training:
    """A fresh GPT with AdamW, under DDP over `group` unless it is None; a call is one step."""

    def __init__(self, group: Any, rows: int, *, sends: bool = True) -> None:
        torch.manual_seed(0)
        self.network = GPT()
        self.optimizer = optim.AdamW(self.network.parameters(), lr=1e-4, fused=True)
        self.model: nn.Module = self.network
        if group is not None:
            self.model = DistributedDataParallel(self.network, process_group=group)
            if not sends:
                self.model.register_comm_hook(None, nothing_sent)
        seeded = torch.Generator().manual_seed(dist.get_rank())
        self.text = torch.randint(256, (rows, CONTEXT + 1), generator=seeded)

    def __call__(self) -> None:
        loss = self.model(self.text)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def compare(mine: nn.Module, other: nn.Module) -> None:
    """Fails if the two, after the same steps, have gradients that differ by more than rounding."""
    for (name, ours), theirs in zip(mine.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def worker(*, backend: str, quick: bool) -> dict[str, list[float]]:
    """Milliseconds a step of each variant, a figure for each turn."""
    world, rows = dist.group.WORLD, rows_of(quick)
    bodies: dict[str, Callable[[], None]] = {
        FLOOR: Training(None, rows),
        SILENT: Training(world, rows, sends=False),
        OURS: (ours := Training(dist.new_group(backend=backend), rows)),
        GLOO: (gloo := Training(world, rows)),
    }
    ours()
    gloo()
    compare(ours.network, gloo.network)
    rounds, repeats = (2, 1) if quick else (16, 8)
    turns = slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))
    return {name: [1e3 * s for s in each] for name, each in turns.items()}


def show(times: dict[str, list[float]], size: int) -> None:
    floor = times[FLOOR]
    for name in (SILENT, OURS, GLOO):
        exposed = [step - least for step, least in zip(times[name], floor, strict=True)]
        report_against(
            f"step of the demo's GPT, {size} processes, {name}",
            times[name],
            "ms",
            (FLOOR, floor),
            paired(times[name], floor),
            at_most=TARGET if name == OURS and size == 2 else None,
            exposed_ms=round(statistics.median(exposed), 3),
            exposed_spread_ms=round(spread(exposed), 3),
        )
    for peer in (SILENT, GLOO):
        report_against(
            f"step of the demo's GPT, {size} processes, {OURS} against {peer}",
            times[OURS],
            "ms",
            (peer, times[peer]),
            paired(times[OURS], times[peer]),
            at_most=TARGET if peer == SILENT and size == 2 else None,
        )


def main() -> None:
    options = arguments(__doc__, backend=("gossamer", "the torch.distributed backend that is ours"))
    if serve(options, worker):
        return
    for size in (2,) if options.quick else (2, 4):
        show(run_processes(size, {"backend": options.backend, "quick": options.quick}), size)


if __name__ == "__main__":
    main()
