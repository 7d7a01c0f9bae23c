"""What it costs to be observed: the demo's GPT on 2 processes, with counters off, on (as always), and with a timeline.

One model that all modes train in turns, so nothing else differs; one thread. Ratios are medians over the turns.
Counters can only be switched off for this measurement.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import arguments, interleaved, paired, report_against, rows_of, run_processes, serve
from torch import optim

import gossamer as gs
from gossamer import _C
from gossamer.workloads.gpt import CONTEXT, GPT

BUCKET_BYTES = 1 << 20  # ten buckets, so that there is something to see
EVENTS = 1 << 17  # as start_timeline() keeps
OFF, ON, TIMELINE = "counters off", "counters on", "counters on and a timeline"
ALWAYS_RATIO = 1.01
ALGORITHMS = {"gradient_allreduce": gs.GradientAllReduce, "bytegrad": gs.ByteGrad}


def use(mode: str) -> None:
    """Switches to `mode` if it is not on. The first call of a turn, which switches, is not timed."""
    if _C.tracing() and mode != TIMELINE:
        _C.stop_trace()
    elif not _C.tracing() and mode == TIMELINE:
        _C.start_trace(EVENTS)
    _C.set_counting(mode != OFF)


def step_of(algorithm: str, rows: int) -> Callable[[], None]:
    torch.manual_seed(0)
    network = GPT()
    optimizer = optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    model = gs.DataParallel(network, optimizer, algorithm=ALGORITHMS[algorithm](), bucket_bytes=BUCKET_BYTES)
    text = torch.randint(256, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(gs.rank()))

    def step() -> None:
        loss = model(text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def timed(algorithm: str, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a step in each mode, by the clock and of processor time, a figure for each turn."""
    step = step_of(algorithm, rows_of(quick))

    def in_mode(mode: str) -> Callable[[], None]:
        def body() -> None:
            use(mode)
            step()

        return body

    rounds, repeats = (2, 1) if quick else (40, 3)
    modes = {mode: in_mode(mode) for mode in (OFF, ON, TIMELINE)}
    turns = interleaved(modes, rounds=rounds, repeats=repeats, before=dist.barrier)
    use(ON)
    return {
        mode: {"wall": [1e3 * s for s in each.seconds], "cpu": [1e3 * s for s in each.cpu_seconds]}
        for mode, each in turns.items()
    }


def main() -> None:
    options = arguments(__doc__)
    if serve(options, timed):
        return
    for algorithm in ALGORITHMS:
        times = run_processes(2, {"algorithm": algorithm, "quick": options.quick})
        off = times[OFF]
        for mode in (ON, TIMELINE):
            ratios = paired(times[mode]["wall"], off["wall"])
            cpu_ratios = paired(times[mode]["cpu"], off["cpu"])
            report_against(
                f"step of the demo's GPT, 2 processes on Gloo, {algorithm}, {mode}",
                times[mode]["wall"],
                "ms",
                (OFF, off["wall"]),
                ratios,
                at_most=ALWAYS_RATIO if mode == ON else None,
                cpu_ratio=round(statistics.median(cpu_ratios), 4),
                quartiles=True,
            )


if __name__ == "__main__":
    main()
