"""The training of `gossamer demo` as each of its workers sees it; cli.py starts them with a job in JSON.

A loop like any other. The four runs differ in the line that makes `model`, and in nothing else.
"""

import json
import statistics
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
from gossamer.demo.model import CONTEXT, GPT

COLUMNS = "{task.description:18}", BarColumn(30), "{task.completed}/{task.total} {task.fields[now]}"


def train(algorithm: str, job: dict[str, Any], group: Any) -> dict[str, Any]:
    """Train on this rank's rows of each global batch; return the figures, means over the group's ranks."""
    rank, size = group.rank(), group.size()
    torch.manual_seed(job["seed"])
    text, validation = data.standard_library()
    network = GPT()
    optimizer = optim.AdamW(network.parameters(), lr=3e-3, fused=True)
    model: nn.Module = network
    if algorithm == "ddp":
        model = nn.parallel.DistributedDataParallel(network)
    elif algorithm != "one process":
        model = gs.DataParallel(network, optimizer, algorithm=algorithm)
    steps, sent_before = [], wire.bytes_sent()
    with Progress(*COLUMNS, disable=rank != 0, refresh_per_second=4) as progress:
        bar = progress.add_task(algorithm, total=job["steps"], now="")
        for step in range(job["steps"]):
            start_s = time.perf_counter()
            rows = data.batch(text, seed=(job["seed"] << 32) + step, rows=job["rows"], context=CONTEXT)
            loss = model(rows.chunk(size)[rank])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ms = (time.perf_counter() - start_s) * 1e3
            steps.append([loss.item(), ms, wire.bytes_sent() - sent_before])
            progress.update(bar, advance=1, now=f"loss {loss.item():.3f}, {ms:.0f} ms/step")
    engine_bytes = model.engine.bytes_sent if isinstance(model, gs.DataParallel) else 0
    rows = data.batch(validation, seed=0, rows=512, context=CONTEXT)[rank::size]
    with torch.no_grad():
        share = network(rows).item() * len(rows) / 512  # the ranks' shares add up to the loss of all rows
    bits = nn.utils.parameters_to_vector(network.parameters()).detach().view(torch.int32)
    dist.broadcast(bits_of_rank_0 := bits.clone(), src=0, group=group)
    end = [share * size, engine_bytes, int((bits != bits_of_rank_0).sum())]
    means = torch.tensor([end, *steps], dtype=torch.float64) / size
    dist.all_reduce(means, group=group)
    losses, step_ms, sent = means[1:].T.tolist()
    return {
        "validation_loss": means[0, 0].item(),
        "step_ms": statistics.median(step_ms),
        "bytes_per_step": sent[-1] / job["steps"],
        "engine_bytes_per_step": means[0, 1].item() / job["steps"],
        "equal_bits": means[0, 2].item() == 0,
        "losses": losses,
        "bytes": sent,
    }


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    gs.init(backend="gloo")
    alone, runs = dist.new_subgroups(1)[0], {}
    for algorithm in job["runs"]:
        if gs.rank() == 0 or algorithm != "one process":  # the others wait for rank 0 in the next run
            runs[algorithm] = train(algorithm, job, alone if algorithm == "one process" else dist.group.WORLD)
    if gs.rank() == 0:
        Path(job["result"]).write_text(json.dumps(runs))
    gs.shutdown()
