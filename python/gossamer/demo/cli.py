"""`gossamer demo`: train one GPT four ways, compare them in a table and a plot, and fail if they disagree.

This is the parent of the workers: it starts them with torch.distributed.run and judges their figures. Where it may, it
then trains some steps over slow links (link.py).
"""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from gossamer import netlab
from gossamer.demo import link
from gossamer.demo.train import Figures
from gossamer.errors import GossamerError
from gossamer.units import parse_rate, rate_text

# The runs, and how far each may end from one process, as a fraction of its validation loss. The exact ones
# only add the same float32 values in another order (seen: 5e-7); bytegrad rounds them to 8 bits (seen, four
# seeds: -3.5e-3 to +0.9e-3, which is training noise and not a loss).
TOLERANCE = {"one process": 0.0, "ddp": 1e-3, "gradient_allreduce": 1e-3, "bytegrad": 1e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes of a parallel run (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows of text per rank and step (%(default)s)")
    parser.add_argument("--rate", default="100mbit", help="rate of the slow links (%(default)s)")
    parser.add_argument("--link-steps", type=int, default=20, metavar="STEPS",
                        help="steps of a run over the slow links, which need root; 0: none (%(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (%(default)s)")
    parser.add_argument("--out", type=Path, default="gossamer-demo.png", help="PNG to draw (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing; needs no matplotlib")


def main(args: argparse.Namespace) -> int:
    """Train, judge, show. 0, or 130 after Ctrl-C; GossamerError if a worker failed or the runs disagree."""
    if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
        raise GossamerError("the plots need matplotlib; pip install it, or pass --no-plot")
    sizes = args.steps, args.ranks, args.batch
    if min(sizes) < 1:
        raise GossamerError(f"--steps, --ranks and --batch must be at least 1, got {sizes}")
    if args.link_steps < 0:
        raise GossamerError(f"--link-steps must be at least 0, got {args.link_steps}")
    parse_rate(args.rate)
    for ending in (signal.SIGTERM, signal.SIGHUP):  # also end the workers, as Ctrl-C does
        signal.signal(ending, signal.default_int_handler)
    try:
        runs, slow, why, failure = train(args), {}, "", None
        check(runs)
        if args.link_steps and not (why := netlab.missing()):
            try:
                slow = link.train(args.link_steps, ranks=args.ranks, rate=args.rate, seed=args.seed)
            except GossamerError as error:  # the runs before are worth a table all the same
                failure = error
            else:
                check_bits(slow)
    except KeyboardInterrupt:
        Console().show_cursor()  # hidden by the worker that drew the progress
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    show(runs, slow, args)
    if why:
        print(link.why_not(why, runs, args.rate))
    if failure is not None:
        raise failure
    return 0


def train(args: argparse.Namespace) -> dict[str, Figures]:
    """The figures of each run, by its name. Whatever happens, no process is left behind."""
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log.txt", "w+") as log:
        result = Path(folder, "runs.json")
        job = {"runs": list(TOLERANCE), "steps": args.steps, "rows": args.batch * args.ranks}
        job |= {"seed": args.seed, "result": str(result)}
        launcher = "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"
        command = [sys.executable, "-m", *launcher, "-m", "gossamer.demo.train", json.dumps(job)]
        # A session of its own: Ctrl-C reaches this process only, which ends the launcher and so the workers.
        process = subprocess.Popen(command, stderr=log, start_new_session=True)
        try:
            process.wait()
        finally:
            process.terminate()
            process.wait()
        if process.returncode != 0:
            raise GossamerError(f"a worker failed:\n{Path(log.name).read_text()[-6000:]}")
        return json.loads(result.read_text())


def check(runs: dict[str, Figures]) -> None:
    """Raise unless every run ended within its tolerance of one process, with equal bits on all ranks."""
    wanted = runs["one process"]["validation_loss"]
    for name, seen in runs.items():
        apart = abs(seen["validation_loss"] - wanted) / wanted
        if not apart <= TOLERANCE[name]:  # so that NaN fails too
            values = f"{seen['validation_loss']:.6f} against {wanted:.6f} of one process, {apart:.1e} apart"
            raise GossamerError(f"the losses disagree: {name} {values}, allowed {TOLERANCE[name]:.0e}")
    check_bits(runs)


def check_bits(runs: dict[str, Figures]) -> None:
    """Raise unless all ranks ended every run with equal bits."""
    for name, seen in runs.items():
        if not seen["equal_bits"]:
            raise GossamerError(f"the ranks hold different bits after {len(seen['losses'])} steps of {name}")


def show(runs: dict[str, Figures], slow: dict[str, Figures], args: argparse.Namespace) -> None:
    """Print the table; write the JSON and the PNG.

    Args:
        runs: the figures of each run by its name.
        slow: the same over slow links; empty where they were not trained.
    """
    heads = ["held-out\nloss", "step\nms", "bytes sent\nper step", "equal\nbits"]
    if slow:
        heads += [f"step ms at\n{rate_text(parse_rate(args.rate))}", "times\nas fast"]
    table = Table("run", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in heads:
        table.add_column(head, justify="right")
    for name, seen in runs.items():
        row = [f"{seen['validation_loss']:.4f}", f"{seen['step_ms']:.0f}", f"{seen['bytes_per_step']:,.0f}"]
        row.append("yes" if seen["equal_bits"] else "no")
        if name in slow:
            row += [f"{slow[name]['step_ms']:.0f}", f"{link.speedup(slow, name):.1f}"]
        table.add_row(name, *row)
    Console().print(table)
    if args.json:
        names = ("steps", "ranks", "batch", "seed", "rate", "link_steps")
        settings = {name: getattr(args, name) for name in names}
        args.json.write_text(json.dumps(settings | {"runs": runs, "slow_runs": slow}) + "\n")
    if not args.no_plot:  # curves that coincide: wide ones lie under narrow ones
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4), layout="constrained")
        by_step, by_bytes = figure.subplots(1, 2, sharey=True)
        for index, (name, seen) in enumerate(runs.items()):
            line = {"label": name, "color": f"C{index}", "linewidth": 7 - 2 * index}
            by_step.plot(seen["losses"], **line)
            if name != "one process":
                by_bytes.plot([sent / 1e6 for sent in seen["bytes"]], seen["losses"], **line)
        by_step.set(xlabel="step", ylabel="training loss, nats per byte")
        by_bytes.set(xlabel="megabytes sent per rank")
        by_step.legend()
        figure.savefig(args.out)
        print(f"plots: {args.out}")
