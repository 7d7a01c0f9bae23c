"""Gather and scale 1000 tensors of mixed sizes into flat memory in one call, against torch._foreach_copy_ and mul_.

Sizes are multiples of 16 elements, because a bucket pads its parameters so. Their logarithms are evenly spread: from
64 to 65,536 on the CPU, to 1,048,576 on a GPU. float32, one thread on the CPU. `roofline` is the share of the speed
of a copy that moves as many bytes. With --gpu: the kernels alone (CUDA graphs), on the current CUDA device; and how
many of our kernels a bucket of ByteGrad takes, counted by torch.profiler in two processes that share the GPU, over
Gloo.
"""

import re
import statistics
from collections import Counter
from typing import Any

import torch
from harness import answer, arguments, as_one, copy_of, interleaved, paired, report, run_processes
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gossamer as gs
from gossamer import _ops

COUNT, SCALE = 1000, 0.5
LARGEST = {"cpu": 1 << 16, "cuda": 1 << 20}
OURS, FOREACH, NAIVE, COPY = "gather", "torch._foreach_copy_ and mul_", "copy_ of each and mul_", "copy"
SHARE = 0.85  # of a copy's speed, on a GPU
LAUNCHES = 4  # for a bucket, besides the two collectives


def sizes_of(device: str) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    ratio = LARGEST[device] / 64
    return [int(64 * ratio**share) // 16 * 16 for share in torch.rand(COUNT, generator=generator).tolist()]


def bench(device: str, *, quick: bool) -> None:
    sizes = sizes_of(device)
    tensors = [torch.randn(size, device=device) for size in sizes]
    flat, theirs = (torch.zeros(sum(sizes), device=device) for _ in range(2))
    places = list(theirs.split(sizes))

    def foreach() -> None:
        torch._foreach_copy_(places, tensors)
        theirs.mul_(SCALE)

    def naive() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        theirs.mul_(SCALE)

    bodies = {
        OURS: lambda: _ops.gather(tensors, flat, scale=SCALE),
        FOREACH: foreach,
        NAIVE: naive,
        COPY: copy_of(2 * flat.nbytes, device),
    }
    bodies[OURS]()
    foreach()
    if not torch.equal(flat, theirs):
        raise ArithmeticError(f"gather of {COUNT} tensors on {device}: it differs from torch's")
    calls, rounds = (1, 3) if quick else (10, 21) if device == "cuda" else (3, 21)
    timed = {name: as_one(body, calls, device) for name, body in bodies.items()}
    turns = interleaved(timed, rounds=rounds, repeats=1)
    seconds = {name: [s / calls for s in each.seconds] for name, each in turns.items()}
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    what = f"{COUNT} tensors, {flat.nbytes / 2**20:.0f} MiB, {where}"
    rates = [2e-9 * flat.nbytes / s for s in seconds[OURS]]
    shares = paired(seconds[COPY], seconds[OURS])
    report(
        f"gather and scale, {what}: against {FOREACH}",
        statistics.median(rates),
        "GB/s moved",
        baseline=(FOREACH, 2e-9 * flat.nbytes / statistics.median(seconds[FOREACH])),
        ratio=statistics.median(paired(seconds[FOREACH], seconds[OURS])),
        at_least=1.0,
        target_of="ratio",
        samples=rates,
        bytes_moved=2 * flat.nbytes,
        naive_times_as_long=round(statistics.median(paired(seconds[NAIVE], seconds[OURS])), 2),
        roofline=round(statistics.median(shares), 3),
    )
    report(
        f"gather and scale, {what}: against a copy of as many bytes",
        statistics.median(rates),
        "GB/s moved",
        baseline=(COPY, 2e-9 * flat.nbytes / statistics.median(seconds[COPY])),
        ratio=statistics.median(shares),
        at_least=SHARE if device == "cuda" else None,
        target_of="ratio",
        samples=rates,
    )


def launches_of_a_backward() -> dict[str, Any]:
    """Our kernels in one synchronised backward under ByteGrad, by name, and the number of buckets."""
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(256, 250) if i % 2 == 0 else nn.Linear(250, 256) for i in range(8)))
    network.cuda()
    model = gs.DataParallel(network, algorithm="bytegrad", bucket_bytes=500_000, first_bucket_bytes=100_000)
    batch = torch.randn(32, 256, device="cuda")

    def backward() -> None:
        network.zero_grad()
        model(batch).square().mean().backward()
        torch.cuda.synchronize()

    for _ in range(3):  # the plan changes after the first
        backward()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        backward()
    on_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names = [re.search(r"gossamer::.*?(\w+)<", event.name) for event in on_device]
    kernels = Counter(name[1] for name in names if name)
    if not kernels:
        others = sorted({event.name for event in on_device})[:10]
        raise RuntimeError(
            f"launches: torch.profiler must see gossamer's kernels in a backward, got {others}"
        )
    buckets = len(model.engine.buckets)
    model.close()
    return {"kernels": dict(kernels), "buckets": buckets}


def bench_launches() -> None:
    counted = run_processes(2, {"count": "launches"})
    kernels, buckets = counted["kernels"], counted["buckets"]
    report(
        f"launches a bucket under ByteGrad, beside the two collectives; {buckets} buckets",
        sum(kernels.values()) / buckets,
        "launches",
        at_most=LAUNCHES,
        kernels=kernels,
    )


def main() -> None:
    options = arguments(__doc__, gpu="on the current CUDA device")
    torch.set_num_threads(1)
    if options.worker:
        gs.init(backend="gloo")
        answer(launches_of_a_backward())
        return
    torch.manual_seed(0)
    bench("cuda" if options.gpu else "cpu", quick=options.quick)
    if options.gpu:
        bench_launches()


if __name__ == "__main__":
    main()
