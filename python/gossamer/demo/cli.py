"""`gossamer demo`: train one GPT four ways, compare them in a table and a plot, and fail if they disagree.

This is the parent of the workers: it starts them with torch.distributed.run and judges their figures."""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gossamer.errors import GossamerError

# The runs, and how far each may end from one process, as a fraction of its validation loss. Exact ones sum the
# same float32 values in another order (seen: 3e-5); bytegrad also rounds them to 8 bits (seen: 1e-3).
TOLERANCE = {"one process": 0.0, "ddp": 1e-3, "gradient_allreduce": 1e-3, "bytegrad": 1e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes of a parallel run (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows of text per rank and step (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    parser.add_argument("--out", type=Path, default="gossamer-demo.png", help="PNG to draw (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing; matplotlib is then not needed")


def main(args: argparse.Namespace) -> int:
    """Train, judge, show; return 0, or 1 after a sentence on standard error, or 130 after Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not (args.no_plot or importlib.util.find_spec("matplotlib")):
            raise GossamerError("the plots need matplotlib; pip install it, or pass --no-plot")
        if min(args.steps, args.ranks, args.batch) < 1:
            values = f"{args.steps}, {args.ranks} and {args.batch}"
            raise GossamerError(f"--steps, --ranks and --batch must be at least 1, got {values}")
        runs = train(args)
        check(runs)
        show(runs, args)
    except KeyboardInterrupt:
        Console().show_cursor()
        print("demo: stopped", file=sys.stderr)
        return 130
    except GossamerError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def train(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of each run, by its name. Whatever happens, no process is left behind."""
    with tempfile.TemporaryDirectory(prefix="gossamer-demo-") as folder:
        log, result = Path(folder, "log.txt"), Path(folder, "runs.json")
        job = {
            "runs": list(TOLERANCE),
            "steps": args.steps,
            "rows": args.batch * args.ranks,
            "seed": args.seed,
        }
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={args.ranks}",
        ]
        command += ["-m", "gossamer.demo.train", json.dumps({**job, "result": str(result)})]
        # In a session of its own, Ctrl-C reaches only this process, which then ends the launcher and its workers.
        with open(log, "w") as errors:
            process = subprocess.Popen(command, stderr=errors, start_new_session=True)
        try:
            process.wait()
        finally:
            process.terminate()
            process.wait()
        if process.returncode != 0:
            raise GossamerError(f"a worker failed:\n{log.read_text()[-6000:]}")
        return json.loads(result.read_text())


def check(runs: dict[str, Any]) -> None:
    """Raise unless every run ended within its tolerance of one process, with equal bits on all ranks."""
    wanted = runs["one process"]["validation_loss"]
    for name, seen in runs.items():
        apart = abs(seen["validation_loss"] - wanted) / wanted
        if not apart <= TOLERANCE[name]:  # so that NaN fails too
            values = f"{seen['validation_loss']:.6f} against {wanted:.6f} of one process, {apart:.1e} apart"
            raise GossamerError(f"the losses disagree: {name} {values}, allowed {TOLERANCE[name]:.0e}")
        if not seen["equal_bits"]:
            raise GossamerError(f"the ranks hold different bits after {len(seen['losses'])} steps of {name}")


def show(runs: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table; write the JSON and the PNG."""
    table = Table("run", "validation loss", "median step ms", "bytes sent per rank and step", "equal bits")
    for name, seen in runs.items():
        row = f"{seen['validation_loss']:.4f}", f"{seen['step_ms']:.0f}", f"{seen['bytes_per_step']:,.0f}"
        table.add_row(name, *row, "yes" if seen["equal_bits"] else "no")
    Console().print(table)
    settings = {name: getattr(args, name) for name in ("steps", "ranks", "batch", "seed")}
    if args.json:
        args.json.write_text(json.dumps({**settings, "runs": runs}) + "\n")
    if not args.no_plot:
        plot(runs, args.out)


def plot(runs: dict[str, Any], file: Path) -> None:
    """Loss against steps and against bytes; the curves coincide, so wide ones lie under narrow ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for (name, seen), width in zip(runs.items(), (7, 5, 3, 1), strict=True):
        by_step.plot(seen["losses"], linewidth=width, label=name)
        by_bytes.plot([sent / 1e6 for sent in seen["bytes"]], seen["losses"], linewidth=width)
    by_step.set(xlabel="step", ylabel="training loss, nats per byte")
    by_bytes.set(xlabel="megabytes sent per rank")
    by_step.legend()
    figure.savefig(file)
    print(f"plots: {file}")
