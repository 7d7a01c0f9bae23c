"""All benchmarks, one after the other: their JSON lines as they come, then one table. `make bench` calls it.

Exit code 1 if a benchmark crashed. A missed target is marked in the table and is no failure: other work on
the machine shows in timings, so read the load beside them. With --gpu only what a GPU changes.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parent
NAMES = (
    *(
        "codec",
        "error",
        "bytes",
        "determinism",
        "exactness",
        "memory",
        "step",
        "observe",
        "powersgd",
        "process_group",
        "autotune",
    ),
    *("allreduce", "collectives", "symmetric", "ddp", "hooks", "fuse_optimizer", "flat", "optim", "horovod"),
    "convergence",
    "uneven",
    "sparse_loco",
    "noloco",
    "muloco",
    "sharded",
    "fsdp_weights",
    "latency",
)
GPU_NAMES = ("codec", "flat", "optim", "step", "symmetric")


def run(name: str, flags: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Runs one benchmark, passes its lines on, and returns them parsed with its exit code."""
    command = [sys.executable, str(FOLDER / f"bench_{name}.py"), *flags]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines += [json.loads(line)] if line.startswith("{") else []
    return lines, process.returncode


def table_of(lines: list[dict[str, Any]]) -> Table:
    table = Table("what", "figure", "spread", "against", "ratio", "target", "met")
    for line in lines:
        bound, sign = (line["at_most"], "≤") if line["at_least"] is None else (line["at_least"], "≥")
        prefix = "ratio " if line["target_of"] == "ratio" else ""
        target = "" if bound is None else f"{prefix}{sign} {bound:g}"
        met = {None: "", True: "[green]yes", False: "[bold red]missed"}[line["met"]]
        against = "" if line["baseline"] is None else f"{line['baseline']}: {line['baseline_value']:.4g}"
        ratio = "" if line["ratio"] is None else f"{line['ratio']:.4g}"
        spread = f"{line['spread']:.2g}" if "spread" in line else ""
        figure = f"{line['value']:.4g} {line['unit']}"
        table.add_row(line["what"], figure, spread, against, ratio, target, met)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a check that all run; the figures mean little")
    parser.add_argument("--gpu", action="store_true", help="what runs on the current CUDA device")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of: {', '.join(NAMES)}")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"NAME must be one of {', '.join(NAMES)}; got {', '.join(sorted(unknown))}")
    flags = [f"--{flag}" for flag in ("quick", "gpu") if getattr(options, flag)]
    every, crashed = [], []
    for name in options.names or (GPU_NAMES if options.gpu else NAMES):
        lines, code = run(name, flags)
        every += lines
        crashed += [name] if code != 0 or not lines else []
    Console().print(table_of(every))
    missed = sum(line["met"] is False for line in every)
    loads = [line["load"] for line in every] or [0.0]
    print(f"{len(every)} results, {missed} targets missed, load average {min(loads)} to {max(loads)}")
    if crashed:
        print(f"crashed: {', '.join(crashed)}", file=sys.stderr)
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
