"""`gossamer demo`: train one GPT four ways, compare them in a table and a plot, and fail if they disagree.

This is the parent of the workers: it starts them with torch.distributed.run and judges their figures.
"""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gossamer.errors import GossamerError

# The runs, and how far each may end from one process, as a fraction of its validation loss. The exact ones
# only add the same float32 values in another order (seen: 5e-7); bytegrad rounds them to 8 bits (seen, four
# seeds: -3.5e-3 to +0.9e-3, which is training noise and not a loss).
TOLERANCE = {"one process": 0.0, "ddp": 1e-3, "gradient_allreduce": 1e-3, "bytegrad": 1e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes of a parallel run (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows of text per rank and step (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    parser.add_argument("--out", type=Path, default="gossamer-demo.png", help="PNG to draw (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing; needs no matplotlib")


def main(args: argparse.Namespace) -> int:
    """Train, judge, show. 0, or 130 after Ctrl-C; GossamerError if a worker failed or the runs disagree."""
    if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
        raise GossamerError("the plots need matplotlib; pip install it, or pass --no-plot")
    sizes = args.steps, args.ranks, args.batch
    if min(sizes) < 1:
        raise GossamerError(f"--steps, --ranks and --batch must be at least 1, got {sizes}")
    for ending in (signal.SIGTERM, signal.SIGHUP):  # also end the workers, as Ctrl-C does
        signal.signal(ending, signal.default_int_handler)
    try:
        runs = train(args)
    except KeyboardInterrupt:
        Console().show_cursor()  # hidden by the worker that drew the progress
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    check(runs)
    show(runs, args)
    return 0


def train(args: argparse.Namespace) -> dict:
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


def check(runs: dict) -> None:
    """Raise unless every run ended within its tolerance of one process, with equal bits on all ranks."""
    wanted = runs["one process"]["validation_loss"]
    for name, seen in runs.items():
        apart = abs(seen["validation_loss"] - wanted) / wanted
        if not apart <= TOLERANCE[name]:  # so that NaN fails too
            values = f"{seen['validation_loss']:.6f} against {wanted:.6f} of one process, {apart:.1e} apart"
            raise GossamerError(f"the losses disagree: {name} {values}, allowed {TOLERANCE[name]:.0e}")
        if not seen["equal_bits"]:
            raise GossamerError(f"the ranks hold different bits after {len(seen['losses'])} steps of {name}")


def show(runs: dict, args: argparse.Namespace) -> None:
    """Print the table; write the JSON and the PNG. Curves that coincide: wide ones lie under narrow ones."""
    heads = "validation\nloss", "median\nstep ms", "bytes sent per\nrank and step", "bits equal\nacross ranks"
    table = Table("run", *heads)
    for name, seen in runs.items():
        row = f"{seen['validation_loss']:.4f}", f"{seen['step_ms']:.0f}", f"{seen['bytes_per_step']:,.0f}"
        table.add_row(name, *row, "yes" if seen["equal_bits"] else "no")
    Console().print(table)
    if args.json:
        settings = {name: getattr(args, name) for name in ("steps", "ranks", "batch", "seed")}
        args.json.write_text(json.dumps(settings | {"runs": runs}) + "\n")
    if not args.no_plot:
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
