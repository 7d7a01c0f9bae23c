"""A codec in a process group: what it costs on one host, where nothing is gained, and what it does to the loss.

Steps: the demo's GPT under stock DDP over groups with and without a codec, and under gs.DataParallel with ByteGrad, in
turns. Losses: 4 processes as 2 hosts of 2 ranks, 200 steps of a small GPT from three seeds, under stock DDP and hybrid
sharding, exact and with 8 bits between the hosts. `gossamer bench network --hosts 2 --ranks-per-host 2 --algorithms
ddp,bytegrad,ddp_int8_group,hsdp,hsdp_int8_group` measures the same programs over slow links.
"""

import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import tasks
import torch
import torch.distributed as dist
from bench_ddp import Training
from harness import (
    arguments,
    interleaved,
    paired,
    report,
    report_against,
    rows_of,
    run_processes,
    serve,
    slowest,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from gossamer.netlab.comparison.variants import hybrid_sharded

EXACT, ENCODED, OURS = "DDP", "DDP, Int8 in the group", "gs.DataParallel, ByteGrad"
SHARDED, SHARDED_ENCODED = "HSDP", "HSDP, Int8 between hosts"
TARGET = 1.03  # of the exact step
HOSTS = [[0, 1], [2, 3]]
INT8 = gs.Int8()


class OursTraining(Training):
    def __init__(self, rows: int) -> None:
        super().__init__(None, rows)
        self.model = gs.DataParallel(self.network, self.optimizer, algorithm=gs.ByteGrad())


def new_group(codec: gs.Codec | None, **more: Any) -> Any:
    return dist.new_group(backend="gossamer", pg_options=gs.Options(codec, min_bytes=0, **more))


def steps(rows: int, *, quick: bool) -> dict[str, list[float]]:
    bodies: dict[str, Callable[[], None]] = {
        EXACT: Training(new_group(None), rows),
        ENCODED: Training(new_group(INT8), rows),
        OURS: OursTraining(rows),
    }
    rounds, repeats = (2, 1) if quick else (16, 8)
    turns = slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))
    return {name: [1e3 * s for s in each] for name, each in turns.items()}


def ddp(network: nn.Module, codec: gs.Codec | None) -> nn.Module:
    return DistributedDataParallel(network, process_group=new_group(codec, hosts=HOSTS))


def hsdp(network: nn.Module, codec: gs.Codec | None) -> nn.Module:
    return hybrid_sharded(network, len(HOSTS[0]), gs.Options(codec, min_bytes=0))


PROGRAMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    EXACT: partial(ddp, codec=None),
    ENCODED: partial(ddp, codec=INT8),
    SHARDED: partial(hsdp, codec=None),
    SHARDED_ENCODED: partial(hsdp, codec=INT8),
}


def final_loss(wrap: Callable[[nn.Module], nn.Module], seed: int, count: int) -> float:
    task = tasks.text()
    torch.manual_seed(seed)
    network = copy.deepcopy(task.model())
    model = wrap(network)
    optimizer = torch.optim.Adam(model.parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(count):
        optimizer.param_groups[0]["lr"] = tasks.learning_rate(task.peak_lr, step, count)
        batch = [part.chunk(size)[rank] for part in task.batch((seed << 32) + step)]
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    with torch.no_grad():
        return model(*task.validation).item()


def losses(*, quick: bool) -> dict[str, list[float]]:
    seeds, count = (1, 8) if quick else (3, 200)
    return {name: [final_loss(wrap, seed, count) for seed in range(seeds)] for name, wrap in PROGRAMS.items()}


def worker(*, part: str, quick: bool) -> dict[str, list[float]]:
    return losses(quick=quick) if part == "losses" else steps(rows_of(quick), quick=quick)


def show_steps(times: dict[str, list[float]], size: int) -> None:
    for name, peer in ((ENCODED, EXACT), (ENCODED, OURS)):
        report_against(
            f"step of the demo's GPT, one host, {size} processes, {name}",
            times[name],
            "ms",
            (peer, times[peer]),
            paired(times[name], times[peer]),
            at_most=TARGET,
        )


def show_losses(found: dict[str, list[float]]) -> None:
    for name, peer in ((ENCODED, EXACT), (SHARDED_ENCODED, SHARDED)):
        mine, theirs = found[name], found[peer]
        report(
            f"loss after 200 steps, 2 x 2 ranks, small GPT, {name}",
            statistics.mean(mine),
            "nats",
            baseline=(peer, statistics.mean(theirs)),
            ratio=statistics.mean(mine) / statistics.mean(theirs),
            losses=mine,
            losses_of_baseline=theirs,
            within_the_spread=min(theirs) <= statistics.mean(mine) <= max(theirs),
        )


def main() -> None:
    options = arguments(__doc__)
    if serve(options, worker):
        return
    job = {"quick": options.quick}
    for size in (2,) if options.quick else (2, 4):
        show_steps(run_processes(size, job | {"part": "steps"}), size)
    show_losses(run_processes(4, job | {"part": "losses"}))


if __name__ == "__main__":
    main()
