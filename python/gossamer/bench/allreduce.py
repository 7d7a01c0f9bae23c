# `gossamer bench allreduce` measures a user's call. benchmarks/bench_allreduce.py compares with the limits of shared
# memory and with MPI. bench/cli.py calls this; launch/workers.py starts the workers if there is no job.
"""Time and bandwidth of an all-reduce of float32 between workers, for each size, backend and codec.

Alone it starts workers on this machine (-np) or on others (-H); inside a job it measures between the job's workers.
The `baseline` is torch.distributed.all_reduce on Gloo, which takes turns with the others in the same run. A figure is
the median of the turns; the time of a turn is that of its slowest worker. `ratio` is how many times as fast as the
baseline. Bandwidths are those of nccl-tests, for the float32 tensor: `algorithm_gb_per_s` is bytes / time, and
`bus_gb_per_s` is that times 2 (n - 1) / n for n workers: without a codec, what the links carry. `bytes_sent` is what
one worker sends in a call; `relative_error` compares with the exact sum.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gossamer import comm, runtime
from gossamer.bench import options as values
from gossamer.bench import showing
from gossamer.bench.measuring import compared, interleaved, label, note, place, short, slowest
from gossamer.collectives import all_reduce
from gossamer.errors import CommError
from gossamer.launch import workers

EXAMPLES = """\
examples:
  gossamer bench allreduce -np 2                        two workers on this machine
  gossamer bench allreduce -np 4 -H a:2,b:2             two on each of two hosts, over ssh
  gossamer run -np 4 -m gossamer bench allreduce        inside a job; torchrun -m gossamer bench ... does too
  gossamer bench allreduce -np 2 --sizes 64KiB,16MiB --codecs none,int8 --plot allreduce.png > allreduce.jsonl
"""
NONE = "none"
CODECS = [NONE, *values.CODECS, *values.FEEDBACK]
BACKENDS, BASELINE = ["gossamer", "gloo"], "gloo"
PEER = f"torch, {BASELINE}"
COLUMNS = {
    "contender": "contender",
    "size": "size",
    "value": "us",
    "ratio": "times as fast",
    "algorithm_gb_per_s": "algorithm GB/s",
    "bus_gb_per_s": "bus GB/s",
    "bytes_sent": "bytes sent",
    "relative_error": "relative error",
}
EXACT = 1e-5  # relative error of a sum of float32 in any order
TURN_S = 0.08
MOST_CALLS = 200  # in a turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    workers.add_arguments(parser)
    add("--sizes", default="4KiB,64KiB,1MiB,16MiB", help="sizes of the tensors (%(default)s)")
    add("--backends", default="all", help=f"all, or some of {', '.join(BACKENDS)} (%(default)s)")
    add("--codecs", default="none,int8,int4", help=f"some of {', '.join(CODECS)} (%(default)s)")
    add("--rounds", type=int, default=7, help="turns of each (%(default)s)")
    add("--plot", metavar="FILE.png", help="draw time and bus bandwidth over size; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Measures, and prints a JSON line for each figure on stdout and a table on stderr. Draws if asked. Returns 0."""
    plot = values.plot_file(args.plot)
    settings = {
        "sizes": values.sizes(args.sizes, "--sizes"),
        "backends": values.chosen(args.backends, BACKENDS, "--backends"),
        "codecs": values.chosen(args.codecs, CODECS, "--codecs"),
        "rounds": values.at_least_one("--rounds", args.rounds),
    }
    lines = workers.on_workers(measure, settings, nproc=args.nproc, hosts=args.hosts, alone=2)
    if lines is None:  # another rank prints
        return 0
    title = f"all-reduce of float32, {lines[0]['ranks']} workers"
    showing.results(title, COLUMNS, lines, command=args.command)
    if plot is not None:
        panels = {"value": "time of a call, us", "bus_gb_per_s": "bus bandwidth, GB/s"}
        showing.curves(plot, lines, panels=panels, x="nbytes", series="contender", title=title)
    return 0


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Does the work of one worker. Returns the lines of the results, which are the same on every rank."""
    runtime.init(backend="gossamer")
    try:
        names = dict.fromkeys([BASELINE, *settings["backends"]])  # in this order on every rank
        groups = {name: dist.new_group(backend=name) for name in names}
        lines = []
        for nbytes in settings["sizes"]:
            if runtime.rank() == 0:
                note(f"all-reduce of {label(nbytes)}, {len(groups)} groups of {runtime.size()}")
            lines += at_size(nbytes, settings, groups)
        return lines
    finally:
        runtime.shutdown()


def at_size(nbytes: int, settings: dict[str, Any], groups: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines of all contenders at one size."""
    x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(runtime.rank()))
    exact = x.double()
    dist.all_reduce(exact, group=groups[BASELINE])
    zeros = torch.zeros_like(x)  # a sum in place would grow from call to call
    bodies: dict[str, Callable[[], object]] = {PEER: partial(dist.all_reduce, zeros, group=groups[BASELINE])}
    facts: dict[str, dict[str, Any]] = {PEER: {"backend": BASELINE, "codec": NONE}}
    for backend in settings["backends"]:
        for codec in settings["codecs"]:
            name = f"{backend}, {codec}"
            bodies[name], facts[name] = contender(x, exact, codec, groups[backend])
            facts[name] |= {"backend": backend, "codec": codec}
    estimate = slowest(interleaved(bodies, rounds=1, repeats=1, before=dist.barrier))
    repeats = min(MOST_CALLS, max(1, int(TURN_S / max(map(max, estimate.values())))))
    seconds = slowest(interleaved(bodies, rounds=settings["rounds"], repeats=repeats, before=dist.barrier))
    return [
        line(name, seconds, nbytes)
        | {"contender": name, "size": label(nbytes), "nbytes": nbytes, "ranks": runtime.size()}
        | {"bytes_sent": None, "relative_error": None}
        | facts[name]
        | place()
        for name in bodies
    ]


def contender(
    x: torch.Tensor, exact: torch.Tensor, codec_name: str, group: Any
) -> tuple[Callable[[], object], dict[str, Any]]:
    """Returns a call of gossamer.all_reduce, and facts: the bytes that it sends, and its distance from the exact sum.

    Raises:
        CommError: the call has no codec and its result is not the sum.
    """
    codec = None if codec_name == NONE else (values.CODECS | values.FEEDBACK)[codec_name]
    error = torch.zeros_like(x) if codec is not None and codec.feeds_back else None
    link = comm.from_group(group, x.device)
    before = link.bytes_sent
    total = all_reduce(x.clone(), codec=codec, error=error, group=group)
    sent = link.bytes_sent - before
    apart = float((total - exact).norm() / exact.norm())
    if codec is None and not apart < EXACT:
        raise CommError(
            f"bench allreduce: rank {runtime.rank()}/{runtime.size()}: the sum of {x.numel()} float32 must be within "
            f"{EXACT:g} of the exact one, got {apart:.3g} apart"
        )
    # A mean stays the same from call to call, while a sum would grow. Without a codec the division costs a pass.
    own, op = (torch.zeros_like(x), "sum") if codec is None else (x.clone(), "mean")
    body = partial(all_reduce, own, codec=codec, op=op, error=error, group=group)
    return body, {"bytes_sent": sent, "relative_error": short(apart)}


def line(name: str, seconds: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    """Returns the result of one contender at one size."""
    size = runtime.size()
    rate = nbytes / statistics.median(seconds[name]) / 1e9
    return compared(
        f"all_reduce, {label(nbytes)}, {size} workers, {name}",
        seconds,
        name,
        PEER,
        scale=1e6,
        unit="us",
        benchmark="allreduce",
        algorithm_gb_per_s=short(rate),
        bus_gb_per_s=short(rate * 2 * (size - 1) / size),
    )
