"""What data parallelism costs in memory: the peak of a process above the bare module's, in gradient sizes.

The kernel's high-water mark (VmHWM) of rank 0 of 2 over Gloo, fresh processes for each variant, three steps
of SGD. The bare module runs in the same processes, group included, without a wrapper.
"""

import json
import re
import statistics
from pathlib import Path

import torch
from harness import answer, arguments, report, run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs

WIDTH, BATCH, STEPS = 1024, 8, 3
BARE, OURS, PEER = "bare module", "DataParallel(gradient_allreduce)", "stock DDP"
VARIANTS = {
    BARE: lambda module, _: module,
    OURS: lambda module, optimizer: gs.DataParallel(module, optimizer),
    "DataParallel(deterministic)": lambda module, optimizer: gs.DataParallel(
        module, optimizer, algorithm=gs.GradientAllReduce(deterministic=True)
    ),
    "DataParallel(bytegrad)": lambda module, optimizer: gs.DataParallel(
        module, optimizer, algorithm=gs.ByteGrad()
    ),
    PEER: lambda module, _: DistributedDataParallel(module),
    "stock DDP, gradients as bucket views": lambda module, _: DistributedDataParallel(
        module, gradient_as_bucket_view=True
    ),
}


def peak_bytes(variant: str, layers: int) -> int:
    """Trains `layers` square layers (4 MiB of gradients each). Returns the most memory that this process ever held."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    model = VARIANTS[variant](module, optimizer)
    x = torch.randn(BATCH, WIDTH)
    for _ in range(STEPS):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    if options.worker:
        gs.init(backend="gloo")
        answer({"peak_bytes": peak_bytes(**json.loads(options.worker))})
        return
    layers, runs = (4, 1) if options.quick else (16, 2)
    chosen = [BARE, OURS, PEER] if options.quick else list(VARIANTS)
    peaks: dict[str, list[int]] = {variant: [] for variant in chosen}
    for _ in range(runs):
        for variant in chosen:
            peaks[variant].append(run_processes(2, {"variant": variant, "layers": layers})["peak_bytes"])
    gradient_bytes = layers * WIDTH * WIDTH * 4
    bare = statistics.median(peaks.pop(BARE))
    over = {name: [(peak - bare) / gradient_bytes for peak in each] for name, each in peaks.items()}
    for variant, each in over.items():
        report(
            f"peak memory over the bare module, {variant}, {gradient_bytes >> 20} MiB of gradients, n = 2",
            statistics.median(each),
            "gradients",
            baseline=(PEER, statistics.median(over[PEER])),
            at_most=1.0 if variant == OURS else None,
            samples=each,
            bare_peak_bytes=int(bare),
        )


if __name__ == "__main__":
    main()
