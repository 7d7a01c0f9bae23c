"""The training of `gossamer demo` as each of its workers sees it; cli.py and link.py start them with a job in JSON.

A loop like any other. The four runs differ in the line that makes `model`, and in nothing else.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress
from torch import nn, optim

import gossamer as gs
from gossamer.demo import wire
from gossamer.workloads import source_text
from gossamer.workloads.gpt import CONTEXT, GPT

COLUMNS = "{task.description:32}", BarColumn(30), "{task.completed}/{task.total} {task.fields[now]}"


class Figures(TypedDict):
    """The figures of one run. `losses` and `bytes` have an entry for each step."""

    validation_loss: float
    step_ms: float
    bytes_per_step: float
    engine_bytes_per_step: float
    equal_bits: bool
    losses: list[float]
    bytes: list[float]


def train(algorithm: str, job: dict[str, Any], group: Any) -> Figures:
    """Train on this rank's rows of each global batch; return the figures, means over the group's ranks."""
    rank, size = group.rank(), group.size()
    torch.manual_seed(job["seed"])
    text, validation = source_text.standard_library()
    network = GPT()
    optimizer = optim.AdamW(network.parameters(), lr=3e-3, fused=True)
    model: nn.Module = network
    if algorithm == "ddp":
        model = nn.parallel.DistributedDataParallel(network)
    elif algorithm != "one process":
        model = gs.DataParallel(network, optimizer, algorithm=algorithm)
    dist.barrier(group=group)  # what was sent before now has arrived, and so been counted
    steps, before = [], bytes_sent(model)
    console = Console(stderr="where" in job)  # over slow links stdout goes into a file
    with Progress(*COLUMNS, console=console, disable=rank != 0, refresh_per_second=4) as progress:
        bar = progress.add_task(algorithm + job.get("where", ""), total=job["steps"], now="")
        for step in range(job["steps"]):
            start_s = time.perf_counter()
            rows = source_text.batch(text, seed=(job["seed"] << 32) + step, rows=job["rows"], context=CONTEXT)
            loss = model(rows.chunk(size)[rank])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ms = (time.perf_counter() - start_s) * 1e3
            steps.append([loss.item(), ms, *bytes_sent(model)])
            progress.update(bar, advance=1, now=f"loss {loss.item():.3f}, {ms:.0f} ms/step")
    dist.barrier(group=group)
    steps[-1][2:] = bytes_sent(model)
    rows = source_text.batch(validation, seed=0, rows=512, context=CONTEXT)[rank::size]
    with torch.no_grad():
        share = network(rows).item() * len(rows) / 512  # the ranks' shares add up to the loss of all rows
    bits = nn.utils.parameters_to_vector(network.parameters()).detach().view(torch.int32)
    dist.broadcast(bits_of_rank_0 := bits.clone(), src=0, group=group)
    first = [share * size, int((bits != bits_of_rank_0).sum()), *before]
    means = torch.tensor([first, *steps], dtype=torch.float64) / size
    dist.all_reduce(means, group=group)
    means[1:, 2:] -= means[0, 2:]
    losses, _, sent, engine_sent = means[1:].T.tolist()
    return {
        "validation_loss": means[0, 0].item(),
        "step_ms": means[1:, 1].quantile(0.5).item(),
        "bytes_per_step": sent[-1] / job["steps"],
        "engine_bytes_per_step": engine_sent[-1] / job["steps"],
        "equal_bits": means[0, 1].item() == 0,
        "losses": losses,
        "bytes": sent,
    }


def bytes_sent(model: nn.Module) -> list[int]:
    """Returns the bytes that this process has sent, by the kernel's count and by the engine's."""
    return [wire.bytes_sent(), model.engine.bytes_sent if isinstance(model, gs.DataParallel) else 0]


def main() -> None:
    """Trains the runs of the job, and writes their figures into its file."""
    job = json.loads(sys.argv[1])
    gs.init(backend="gloo")
    alone, runs = dist.new_subgroups(1)[0], {}
    for algorithm in job["runs"]:
        if gs.rank() == 0 or algorithm != "one process":  # the others wait for rank 0 in the next run
            runs[algorithm] = train(algorithm, job, alone if algorithm == "one process" else dist.group.WORLD)
    if gs.rank() == 0:
        Path(job["result"]).write_text(json.dumps(runs))
    gs.shutdown()


if __name__ == "__main__":
    main()
