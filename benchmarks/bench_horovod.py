"""The Horovod face with 2 processes: named allreduces beside torch.distributed's own Gloo, and a training step of
DistributedOptimizer on the demo's GPT beside stock DDP on Gloo.

Contenders take turns in the same processes; a figure is the median over the turns of what the slowest rank took, in
place, float32. "4 bytes" and "64 MiB" are one blocking call, "160 x 4 KB" and "160 x 640 KB" are as many asynchronous
ones that are then waited for.
"""

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import answer, arguments, interleaved, paired, report, rows_of, run_processes, slowest
from torch import optim
from torch.nn.parallel import DistributedDataParallel as StockDDP

import gossamer.horovod.torch as hvd
from gossamer.workloads.gpt import CONTEXT, GPT

GLOO, OURS = "torch's Gloo", "hvd"
# name: (tensors, elements, calls a turn); a quick run measures the first QUICK
SIZES = {
    "4 bytes": (1, 1, 200),
    "160 x 4 KB": (160, 1000, 20),
    "64 MiB": (1, 1 << 24, 2),
    "160 x 640 KB": (160, 160_000, 2),
}
QUICK = 2
# backend and name: at most so many ms, or so many times torch's Gloo; of 64 MiB on "gossamer" at least 5 times faster
IN_MS = {("gossamer", "4 bytes"): 0.1, ("gossamer", "160 x 4 KB"): 1.5, ("gloo", "160 x 4 KB"): 9.0}
IN_GLOO = {("gloo", "4 bytes"): 1.3, ("gloo", "64 MiB"): 1.05, ("gossamer", "64 MiB"): 0.2}
STOCK, OPTIMIZER = "stock DDP", "DistributedOptimizer"


def contenders(what: str, group: Any, calls: int) -> dict[str, Callable[[], None]]:
    """Both contenders, on tensors of their own, after a check of their results."""
    count, numel, _ = SIZES[what]
    size = hvd.size()
    theirs, ours = ([torch.ones(numel) for _ in range(count)] for _ in range(2))

    def with_gloo() -> None:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in theirs]
        for work in works:
            work.wait()

    def with_hvd() -> None:
        handles = [
            hvd.allreduce_async_(tensor, name=f"{what} {i}", op=hvd.Sum) for i, tensor in enumerate(ours)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    for body, tensors in ((with_gloo, theirs), (with_hvd, ours)):
        body()
        if any(tensor[-1] != size for tensor in tensors):
            raise ArithmeticError(f"rank {hvd.rank()}: {what}: the sum is wrong")
        for tensor in tensors:
            tensor.zero_()  # sums of sums would overflow

    def repeated(body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                body()

        return run

    return {GLOO: repeated(with_gloo), OURS: repeated(with_hvd)}


def collectives(*, backend: str, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a call by what and contender, a figure for each turn."""
    hvd.init(backend=backend)
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
    times = {}
    for what in list(SIZES)[: QUICK if quick else None]:
        calls = 1 if quick else SIZES[what][2]
        bodies = contenders(what, group, calls)
        turns = interleaved(bodies, rounds=2 if quick else 9, repeats=1 if quick else 3, before=dist.barrier)
        times[what] = {name: [1e3 * s / calls for s in each] for name, each in slowest(turns).items()}
    return times


def step_of(variant: str, rows: int) -> Callable[[], None]:
    """A fresh GPT with AdamW; calling it is one training step."""
    torch.manual_seed(0)
    network = GPT()
    optimizer: Any = optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    model: Any = network
    if variant == STOCK:
        model = StockDDP(network)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())
    text = torch.randint(256, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(hvd.rank()))

    def step() -> None:
        loss = model(text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    if variant == OPTIMIZER and optimizer.report()["way"] != "engine":
        raise RuntimeError(f"DistributedOptimizer does not ride on the engine: {optimizer.report()}")
    return step


def steps(*, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a step by contender, a figure for each turn."""
    hvd.init(backend="gloo")
    rounds, repeats = (2, 1) if quick else (16, 8)
    bodies = {variant: step_of(variant, rows_of(quick)) for variant in (STOCK, OPTIMIZER)}
    turns = slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))
    return {"step": {name: [1e3 * s for s in each] for name, each in turns.items()}}


def show(what: str, each: dict[str, list[float]], baseline: str, ours: str, **targets: Any) -> None:
    report(
        what,
        statistics.median(each[ours]),
        "ms",
        baseline=(baseline, statistics.median(each[baseline])),
        ratio=statistics.median(paired(each[ours], each[baseline])),
        samples=each[ours],
        **targets,
    )


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    if options.worker:
        job = json.loads(options.worker)
        gs_times = steps(quick=job["quick"]) if job["backend"] is None else collectives(**job)
        answer(gs_times)
        return
    for backend in ("gossamer", "gloo"):
        times = run_processes(2, {"backend": backend, "quick": options.quick})
        for what, each in times.items():
            targets: dict[str, Any] = {}
            if (backend, what) in IN_MS:
                targets = {"at_most": IN_MS[backend, what]}
            elif (backend, what) in IN_GLOO:
                targets = {"at_most": IN_GLOO[backend, what], "target_of": "ratio"}
            show(f"{what}, named, 2 ranks on {backend}", each, GLOO, OURS, **targets)
    times = run_processes(2, {"backend": None, "quick": options.quick})
    what = "step of the demo's GPT, 2 ranks on Gloo, DistributedOptimizer"
    show(what, times["step"], STOCK, OPTIMIZER, at_most=1.0, target_of="ratio")


if __name__ == "__main__":
    main()
