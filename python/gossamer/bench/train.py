# `gossamer bench train` times steps; `gossamer demo` and benchmarks/bench_convergence.py judge losses.
# bench/cli.py calls this, and benchmarks/bench_step.py times the same steps.
"""The time of a training step of the demo's GPT (1.07 M parameters) under each algorithm, beside torch's DDP on Gloo.

Alone it starts workers on this machine (-np) or on others (-H); inside a job it uses the job's workers. Every variant
trains its own copy of the model in the same processes, in turns. A figure is the median of the turns; the time of a
turn is that of its slowest worker. `ratio` is how many times as fast as torch's DDP. `cpu_ms` is the processor time of
all threads of rank 0 in a step, which tells work from waiting. `bytes_per_step` is what Gossamer on rank 0 sends in it.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as StockDDP

from gossamer import runtime
from gossamer.algorithms import ALGORITHMS, Algorithm, GradientAllReduce
from gossamer.bench import options as values
from gossamer.bench import showing
from gossamer.bench.measuring import Turns, compared, interleaved, note, place, short, slowest
from gossamer.data_parallel import DataParallel
from gossamer.launch import workers
from gossamer.workloads.gpt import CONTEXT, GPT

EXAMPLES = """\
examples:
  gossamer bench train -np 2                                     every algorithm, two workers on this machine
  gossamer bench train -np 2 --algorithms bytegrad,local_sgd --steps 30
  gossamer bench train -np 4 -H a:2,b:2 --plot train.png         two on each of two hosts, over ssh
  gossamer run -np 4 -m gossamer bench train                     inside a job
"""
STOCK = "torch DDP"
PER_TURN = 10  # steps: LocalSGD's period, so that a turn holds one averaging
COLUMNS = {
    "algorithm": "algorithm",
    "value": "step ms",
    "ratio": "times as fast",
    "cpu_ms": "processor ms",
    "bytes_per_step": "bytes per step",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    workers.add_arguments(parser)
    known = ", ".join(ALGORITHMS)
    add("--algorithms", default="all", help=f"all, or some of {known} (%(default)s)")
    add(
        "--backend",
        choices=("gossamer", "gloo"),
        default="gossamer",
        help="backend of our groups; torch's DDP uses Gloo (%(default)s)",
    )
    add("--rows", type=int, default=8, help="rows of text per worker and step (%(default)s)")
    add("--steps", type=int, default=60, help=f"timed steps, in turns of {PER_TURN} (%(default)s)")
    add("--plot", metavar="FILE.png", help="draw time and bytes of a step; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Measures, and prints a JSON line for each variant on stdout and a table on stderr. Draws if asked. Returns 0."""
    plot = values.plot_file(args.plot)
    settings = {
        "algorithms": values.chosen(args.algorithms, list(ALGORITHMS), "--algorithms"),
        "backend": args.backend,
        "rows": values.at_least_one("--rows", args.rows),
        "rounds": -(-values.at_least_one("--steps", args.steps) // PER_TURN),
    }
    lines = workers.on_workers(measure, settings, nproc=args.nproc, hosts=args.hosts, alone=2)
    if lines is None:  # another rank prints
        return 0
    title = f"a training step of the demo's GPT, {lines[0]['ranks']} workers"
    showing.results(title, COLUMNS, lines, command=args.command)
    if plot is not None:
        panels = {"value": "time of a step, ms", "bytes_per_step": "bytes sent per worker and step"}
        showing.bars(plot, lines, panels=panels, series="algorithm", title=title)
    return 0


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Does the work of one worker. Returns the lines of the results, which are the same on every rank."""
    runtime.init(backend="gloo")
    try:
        group = dist.new_group(backend=settings["backend"])
        rows = settings["rows"]
        trainings = {STOCK: Training(lambda network, _: StockDDP(network), rows=rows)}
        for name in settings["algorithms"]:
            algorithm = ALGORITHMS[name]()
            wrap = partial(DataParallel, algorithm=algorithm, process_group=group)
            trainings[name] = Training(wrap, rows=rows, algorithm=algorithm)
        if runtime.rank() == 0:
            note(f"{settings['rounds']} turns of {PER_TURN} steps, {len(trainings)} variants")
        turns, sent = timed(trainings, settings["rounds"])
        seconds = slowest(turns, mean=True)
        lines = [_line(name, seconds, turns[name], sent[name]) for name in trainings]
        for training in trainings.values():
            training.close()
        return lines
    finally:
        runtime.shutdown()


Wrap = Callable[[nn.Module, optim.Optimizer], nn.Module]


class Training:
    """A new GPT and its optimizer, wrapped. A call makes one training step on this rank's rows of text.

    Args:
        wrap: makes the model that is trained from the network and its optimizer.
        rows: rows of text in a step.
        algorithm: the algorithm that chooses the optimizer. None: AdamW.
    """

    def __init__(self, wrap: Wrap, *, rows: int, algorithm: Algorithm | None = None) -> None:
        torch.manual_seed(0)
        network = GPT()
        # The warm-up ends after the first step.
        kind = type(algorithm or GradientAllReduce())
        self.optimizer: optim.Optimizer = kind.make_optimizer(network.parameters(), lr=1e-4, warmup_steps=1)
        self.model: nn.Module = wrap(network, self.optimizer)
        seed = torch.Generator().manual_seed(runtime.rank())
        self.text: torch.Tensor = torch.randint(256, (rows, CONTEXT + 1), generator=seed)

    def __call__(self) -> None:
        loss = self.model(self.text)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that this rank has sent; None for torch's DDP, which does not count."""
        return self.model.engine.bytes_sent if isinstance(self.model, DataParallel) else None

    def close(self) -> None:
        if isinstance(self.model, DataParallel):
            self.model.close()


def timed(trainings: Mapping[str, Training], rounds: int) -> tuple[dict[str, Turns], dict[str, float | None]]:
    """Returns this rank's turns, and the bytes that it sent in a mean step."""
    interleaved(trainings, rounds=0, repeats=0)  # the first steps: buckets are planned, warm-ups end
    before = {name: training.bytes_sent for name, training in trainings.items()}
    # Without untimed steps, a turn is a whole period.
    turns = interleaved(trainings, rounds=rounds, repeats=PER_TURN, before=dist.barrier, untimed=0)
    sent: dict[str, float | None] = {}
    for name, training in trainings.items():
        first, last = before[name], training.bytes_sent
        steps = rounds * PER_TURN + 2
        sent[name] = None if first is None or last is None else (last - first) / steps
    return turns, sent


def _line(name: str, seconds: Mapping[str, list[float]], turns: Turns, sent: float | None) -> dict[str, Any]:
    size = runtime.size()
    line = compared(
        f"step of the demo's GPT, {size} workers, {name}",
        seconds,
        name,
        STOCK,
        scale=1e3,
        unit="ms",
        benchmark="train",
        algorithm=name,
        ranks=size,
        cpu_ms=short(1e3 * statistics.median(turns.cpu_seconds)),
        bytes_per_step=None if sent is None else round(sent),
    )
    return line | place()
