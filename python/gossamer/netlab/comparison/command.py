# `gossamer bench network`: makes the hosts, starts the ranks (worker.py) on them, and prints and draws what they have
# measured. steps.py and loss.py measure, lines.py makes the lines of results. bench/cli.py and the study in
# benchmarks/netlab call it.
"""Trains a model on several hosts over slow links, with every algorithm and with what stock torch has, in one run.

The hosts are network namespaces on this machine, and their links are shaped in both directions: Linux, root and
iproute2 are needed, and nothing is left behind. All variants train copies of the model in the same processes, in turns;
a figure is the median of the turns on the slowest rank. Or, with --to-loss, each trains alone until it has the
validation loss that stock DDP ends with. Bytes are counted by Gossamer and, on each host's eth0, by the kernel.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.bench import options as values
from gossamer.bench import showing
from gossamer.bench.measuring import note
from gossamer.errors import ConfigError
from gossamer.netlab import Shape, missing, run_on_hosts
from gossamer.netlab.comparison import lines as of
from gossamer.netlab.comparison.loss import FIRST
from gossamer.netlab.comparison.steps import PER_TURN
from gossamer.netlab.comparison.tasks import TASKS
from gossamer.netlab.comparison.variants import FLAT, OURS, PEERS, PROGRAMS, SHARDED, VARIANTS

EXAMPLES = """\
examples:
  gossamer bench network                                    everything, 4 hosts at 100 Mbit/s
  gossamer bench network --rate 1gbit --algorithms ddp,bytegrad,int4
  gossamer bench network --hosts 2 --ranks-per-host 2       by hosts, and in one level
  gossamer bench network --to-loss --steps 150 --seeds 3 --algorithms ddp,int4,local_sgd --output results
"""
STEP_COLUMNS = {
    "algorithm": "algorithm",
    "step_ms": "step ms",
    "speedup_over_ddp": "times ddp",
    "payload_by_kernel": "on eth0",
    "bytes_over_ddp": "of ddp's",
    "byte_limit_ms": "limit ms",
    "step_over_limit": "over limit",
    "compute_ms": "compute ms",
    "step_over_allowed": "over allowed",
}
LOSS_COLUMNS = {
    "algorithm": "algorithm",
    "value": "seconds",
    "ratio": "times ddp",
    "steps": "steps",
    "final_losses": "losses",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    known = ", ".join(VARIANTS)
    add("--hosts", type=int, default=4, help="number of hosts (%(default)s)")
    add("--rate", default="100mbit", help="rate of each host's link, each way (%(default)s)")
    add("--ranks-per-host", type=int, default=1, help="ranks on a host (%(default)s)")
    add("--algorithms", default="all", help=f"all, or some of {known} (%(default)s)")
    add("--model", choices=list(TASKS), default="gpt", help="2.5 M parameters, or 0.3 M (%(default)s)")
    add("--rows", type=int, help="rows of data per rank and step (gpt 1, cnn 8)")
    add("--lr", type=float, help="learning rate (1e-3)")
    add(
        "--backend",
        choices=("gloo", "gossamer"),
        default="gloo",
        help="backend of our algorithms; torch's DDP uses Gloo (%(default)s)",
    )
    add("--steps", type=int, help="timed steps of each (10); with --to-loss the steps of stock DDP (150)")
    add("--to-loss", action="store_true", help="train to the validation loss that stock DDP ends with")
    add("--seeds", type=int, default=1, help="with --to-loss: trainings of each (%(default)s)")
    add("--first-seed", type=int, default=0, help="with --to-loss: the first of the seeds (%(default)s)")
    add("--every", type=int, default=16, help="with --to-loss: steps between validations (%(default)s)")
    add("--timeout", type=float, default=3600, help="seconds the run may take (%(default)g)")
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write the lines and a picture into it; needs matplotlib",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints a JSON line for each variant on stdout and a table on stderr, and draws.

    Returns 0, or 130 after Ctrl-C.
    """
    try:
        lines, curves = measure(args)
    except KeyboardInterrupt:
        note("gossamer bench network: stopped; the hosts are removed")
        return 130
    what = "seconds to the loss that stock DDP ends with" if args.to_loss else "a training step"
    columns = LOSS_COLUMNS if args.to_loss else STEP_COLUMNS
    showing.results(f"{what}, {_where(args)}", columns, lines, command=args.command)
    if args.output is not None:
        write(args, lines, curves)
    return 0


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the lines of the results, and with --to-loss the curves. Raises as run_on_hosts() does."""
    job = _job(args)
    if args.output is not None:
        values.plot_file(str(args.output / "plot.png"))
    if why := missing():
        raise ConfigError(why)
    with tempfile.TemporaryDirectory() as folder:
        result, file = Path(folder, "result.json"), Path(folder, "job.json")
        file.write_text(json.dumps(job | {"result": str(result), "weights": str(Path(folder, "weights"))}))
        command = [sys.executable, "-m", "gossamer.netlab.comparison.worker", str(file)]
        run_on_hosts(
            command,
            args.hosts,
            rate=args.rate,
            ranks_per_host=args.ranks_per_host,
            timeout_s=args.timeout,
            shown=[0],
        )
        written = json.loads(result.read_text())
    about = {name: getattr(args, name) for name in ("hosts", "ranks_per_host", "rate", "model", "backend")}
    about |= written["about"] | {"burst_bytes": Shape(args.rate).burst_bytes, "command": args.command}
    found = written["found"]
    return (of.of_losses(found, about), found) if args.to_loss else (of.of_steps(found, about), [])


def _job(args: argparse.Namespace) -> dict[str, Any]:
    steps = (150 if args.to_loss else 10) if args.steps is None else args.steps
    values.at_least_one("--steps", steps)
    for flag in ("hosts", "ranks_per_host", "seeds", "every", "rows"):
        if getattr(args, flag) is not None:
            values.at_least_one(f"--{flag.replace('_', '-')}", getattr(args, flag))
    if args.lr is not None and not args.lr > 0:
        raise ConfigError(f"--lr: must be above 0, got {args.lr}")
    Shape(args.rate).burst_bytes  # noqa: B018, raises if the rate is wrong
    several = args.ranks_per_host > 1 and args.hosts > 1
    known = PEERS | OURS | PROGRAMS | (FLAT | SHARDED if several else {})
    names = values.chosen(args.algorithms, list(known), "--algorithms")
    if args.to_loss and FIRST not in names:
        raise ConfigError(
            f"--to-loss: the others are judged by {FIRST}, add it to --algorithms, got {args.algorithms}"
        )
    as_given = ("model", "rows", "lr", "backend", "ranks_per_host", "to_loss", "every")
    return {name: getattr(args, name) for name in as_given} | {
        "algorithms": sorted(names, key=list(known).index),
        "timeout_s": min(args.timeout, 600),
        "rounds": -(-steps // PER_TURN),
        "steps": steps,
        "seeds": list(range(args.first_seed, args.first_seed + args.seeds)),
    }


def write(
    args: argparse.Namespace, lines: Sequence[Mapping[str, Any]], curves: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the lines, the curves and a picture into the folder of --output."""
    kind = "loss" if args.to_loss else "steps"
    stem = f"{kind}-{args.hosts}x{args.ranks_per_host}-{args.rate}-{args.model}"
    args.output.mkdir(parents=True, exist_ok=True)
    for name, each in ((stem, lines), (f"{stem}-curves", curves)):
        if each:
            (args.output / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    draw(args.output / f"{stem}.png", args, lines, curves)


def draw(
    file: Path,
    args: argparse.Namespace,
    lines: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
) -> None:
    """Draws the curves of the loss, or bars of the steps if there are no curves. Needs matplotlib."""
    if curves:
        _draw_curves(file, curves, title=_where(args))
        return
    panels = {"step_ms": "time of a step, ms", "payload_by_kernel": "bytes sent per host and step"}
    showing.bars(file, lines, panels=panels, series="algorithm", title=f"a training step, {_where(args)}")


def _where(args: argparse.Namespace) -> str:
    return f"{args.hosts} hosts x {args.ranks_per_host}, {args.rate}, {args.model}"


def _draw_curves(file: Path, runs: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Draws a colour for each variant and a thin line for each seed, over logarithmic seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    names = list(dict.fromkeys(run["algorithm"] for run in runs))
    for index, name in enumerate(names):
        own = [run for run in runs if run["algorithm"] == name]
        style = f"C{index % 10}" + ("-" if index < 10 else "--")
        for number, run in enumerate(own):
            label = name if number == 0 else "_"
            panel.plot(run["seconds"][1:], run["losses"][1:], style, linewidth=1, label=label)
    panel.set(xscale="log", xlabel="seconds of training", ylabel="validation loss, nats", title=title)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    showing.save(figure, file)
