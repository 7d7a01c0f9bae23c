"""The time of a training step of the demo's GPT: alone and with 2 processes on Gloo, against stock DDP.

Every variant trains its own copy in the same process, in turns; one thread. Ratios are medians over the
turns. cpu_ms is the processor time of a step, all threads of rank 0: it separates work from waiting for a core.
With --gpu: a larger GPT on ranks that share the current GPU (gpu_training.py).
"""

import json
import statistics
from functools import partial

import gpu_training
import torch
import torch.distributed as dist
from harness import answer, arguments, interleaved, paired, report_against, rows_of, run_processes
from torch.nn.parallel import DistributedDataParallel as StockDDP

import gossamer as gs
from gossamer.bench.train import Training, Wrap

ALONE = (
    "bare module",
    "DataParallel(gradient_allreduce)",
    "stock DDP",
    "DistributedDataParallel",
    "stock DDP, gradients as bucket views",
)
OURS = ALONE[3]
TOGETHER = (*ALONE[1:], "DataParallel(deterministic)", "DataParallel(bytegrad)")
ALONE_RATIO, TOGETHER_RATIO = 1.03, 1.0
WRAPS: dict[str, Wrap] = {
    ALONE[0]: lambda network, _: network,
    ALONE[1]: partial(gs.DataParallel, algorithm=gs.GradientAllReduce()),
    ALONE[2]: lambda network, _: StockDDP(network),
    OURS: lambda network, _: gs.DistributedDataParallel(network),
    ALONE[4]: lambda network, _: StockDDP(network, gradient_as_bucket_view=True),
    TOGETHER[-2]: partial(gs.DataParallel, algorithm=gs.GradientAllReduce(deterministic=True)),
    TOGETHER[-1]: partial(gs.DataParallel, algorithm=gs.ByteGrad()),
}


def timed(variants: tuple[str, ...], quick: bool) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a step, by the clock ("wall") and of processor time ("cpu"), a figure for each turn."""
    bodies = {variant: Training(WRAPS[variant], rows=rows_of(quick)) for variant in variants}
    rounds, repeats = (2, 1) if quick else (16, 8)
    turns = interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier)
    return {
        variant: {"wall": [1e3 * s for s in each.seconds], "cpu": [1e3 * s for s in each.cpu_seconds]}
        for variant, each in turns.items()
    }


def show(
    times: dict[str, dict[str, list[float]]], baseline: str, *, where: str, targets: dict[str, float]
) -> None:
    for variant, each in times.items():
        if variant == baseline:
            continue
        ratios = paired(each["wall"], times[baseline]["wall"])
        cpu_ratios = paired(each["cpu"], times[baseline]["cpu"])
        report_against(
            f"step of the demo's GPT, {where}, {variant}",
            each["wall"],
            "ms",
            (baseline, times[baseline]["wall"]),
            ratios,
            at_most=targets.get(variant),
            cpu_ms=round(statistics.median(each["cpu"]), 3),
            cpu_ratio=round(statistics.median(cpu_ratios), 4),
            quartiles=True,
        )


def main() -> None:
    options = arguments(__doc__, gpu="several ranks on the current CUDA device")
    torch.set_num_threads(1)
    if options.gpu:
        gpu_training.measure(quick=options.quick)
        return
    gs.init(backend="gloo")
    if options.worker:
        job = json.loads(options.worker)
        answer(gpu_training.worker(**job) if "path" in job else timed(TOGETHER, **job))
        return
    alone = timed(ALONE, options.quick)
    ours, peer = ALONE[1:3]
    show(alone, "bare module", where="1 process", targets={ours: ALONE_RATIO})
    against = {name: alone[name] for name in (ours, peer, OURS)}
    show(against, peer, where="1 process", targets=dict.fromkeys((ours, OURS), 1.0))
    gs.shutdown()
    together = run_processes(2, {"quick": options.quick})
    show(together, peer, where="2 processes on Gloo", targets=dict.fromkeys((ours, OURS), TOGETHER_RATIO))


if __name__ == "__main__":
    main()
