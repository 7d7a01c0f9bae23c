"""The training of `gossamer demo`, as each of its workers sees it; cli.py starts them with a job in JSON.

A loop like any other. The four runs differ in what `parallel` returns, and in nothing else."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress
from torch import nn, optim

import gossamer as gs
from gossamer.demo import data, wire
from gossamer.demo.model import GPT

CONTEXT, VALIDATION_ROWS, LEARNING_RATE = 64, 512, 3e-3
COLUMNS = "{task.description:18}", BarColumn(30), "{task.completed}/{task.total} {task.fields[now]}"


def parallel(model: nn.Module, optimizer: optim.Optimizer, algorithm: str) -> nn.Module:
    """The line in which the runs differ."""
    if algorithm == "one process":
        return model
    if algorithm == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return gs.DataParallel(model, optimizer, algorithm=algorithm)


def train(algorithm: str, job: dict[str, Any], group: Any) -> dict[str, Any]:
    """Train on this rank's rows of each global batch; return the figures, means over the ranks of the group."""
    rank, size = group.rank(), group.size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    torch.manual_seed(job["seed"])
    network = GPT(context=CONTEXT)
    optimizer = optim.AdamW(network.parameters(), lr=LEARNING_RATE, fused=True)
    model = parallel(network, optimizer, algorithm)
    text, validation = data.standard_library()
    figures = []  # of each step: loss, ms, bytes sent so far
    sent_before = wire.bytes_sent()
    with Progress(*COLUMNS, disable=rank != 0, refresh_per_second=4) as progress:
        bar = progress.add_task(algorithm, total=job["steps"], now="")
        for step in range(job["steps"]):
            start_s = time.perf_counter()
            rows = data.batch(text, seed=job["seed"] + step, rows=job["rows"], context=CONTEXT)
            loss = model(rows.chunk(size)[rank])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ms = (time.perf_counter() - start_s) * 1e3
            figures.append((loss.item(), ms, wire.bytes_sent() - sent_before))
            progress.update(bar, advance=1, now=f"loss {loss.item():.3f}, {ms:.0f} ms/step")
    engine_bytes = model.engine.bytes_sent if isinstance(model, gs.DataParallel) else 0
    rows = data.batch(validation, seed=0, rows=VALIDATION_ROWS, context=CONTEXT)[rank::size]
    with torch.no_grad():
        share = network(rows).item() * len(rows) / VALIDATION_ROWS  # the ranks' shares add up to the loss
    bits = nn.utils.parameters_to_vector(network.parameters()).detach().view(torch.int32)
    rank_0_bits = bits.clone()
    dist.broadcast(rank_0_bits, src=0, group=group)
    losses, step_ms, sent = mean(figures, group).unbind(1)
    return {
        "validation_loss": mean(share, group).item() * size,
        "step_ms": step_ms.median().item(),
        "bytes_per_step": sent[-1].item() / job["steps"],
        "engine_bytes_per_step": mean(engine_bytes, group).item() / job["steps"],
        "equal_bits": mean((bits != rank_0_bits).sum(), group).item() == 0,
        "losses": losses.tolist(),
        "bytes": sent.tolist(),
    }


def mean(values: Any, group: Any) -> torch.Tensor:
    """Over the ranks, in float64."""
    values = torch.as_tensor(values, dtype=torch.float64)
    dist.all_reduce(values, group=group)
    return values / group.size()


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    gs.init(backend="gloo")
    runs = {}
    for algorithm in job["runs"]:
        group = dist.new_group([0]) if algorithm == "one process" else dist.group.WORLD
        if gs.rank() in dist.get_process_group_ranks(group):  # else wait for rank 0 in the next run
            runs[algorithm] = train(algorithm, job, group)
    if gs.rank() == 0:
        Path(job["result"]).write_text(json.dumps(runs))
    gs.shutdown()
