"""The planner against the lab: predicts every line of results of `gossamer bench network`, and compares.

    python benchmarks/netlab/validate_planner.py --measure benchmarks/netlab/results
    python benchmarks/netlab/validate_planner.py benchmarks/netlab/results

reads the lines with a step's time from the folder's *.jsonl and predicts each from the model's parameters, the
measured time of a step without communication, the link's nominal rate, and what `gossamer plan --measure` found on
the same hosts: latency and the speeds of codecs and memory. That is in plan-HOSTSxRANKS-RATE.json of the same folder,
which --measure makes (root and iproute2, as for the lab). Nothing is fitted to an algorithm. Prints a table and the
worst error, or with --json lines. Exit code 1 if an error is above --tolerance.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gossamer import config
from gossamer.netlab import run_on_hosts
from gossamer.netlab.comparison.tasks import TASKS
from gossamer.netlab.comparison.variants import VARIANTS, Variant
from gossamer.planner import CodecSpeed, Network, Problem, Speeds, Stock, of_module, predict
from gossamer.planner.network import TCP_SHARE
from gossamer.units import parse_rate

HOOKS = {
    "ddp": None,
    "ddp_fp16_hook": "fp16",
    "ddp_powersgd_hook": "powersgd",
    "ddp_post_local_sgd": "post_local_sgd",
}


def main() -> int:
    options = _options()
    lines = list(_lines(options.folder))
    if not lines:
        sys.exit(f"validate_planner: no line with a step's time in {options.folder}/*.jsonl")
    if options.measure:
        for hosts, per_host, rate in dict.fromkeys(_place(line) for line in lines):
            _measure(options.folder, hosts, per_host, rate)
    rows = [_compared(options.folder, line, options.cores) for line in lines]
    rows.sort(key=lambda row: (row["hosts"], row["ranks_per_host"], row["model"], parse_rate(row["rate"])))
    worst = max(rows, key=lambda row: abs(row["error"]))
    if options.json:
        for row in rows:
            print(json.dumps(row))
    else:
        _show(rows)
    print(
        f"worst of {len(rows)}: {worst['error']:+.1%}, {worst['algorithm']} at {worst['rate']}, {worst['model']}",
        file=sys.stderr if options.json else sys.stdout,
    )
    return int(abs(worst["error"]) > options.tolerance)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--measure", action="store_true", help="measure the networks of all lines first")
    parser.add_argument("--cores", type=float, default=2, help="of the machine, for all ranks (%(default)g)")
    parser.add_argument("--tolerance", type=float, default=0.2, help="(%(default)g)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            variant = VARIANTS.get(line["algorithm"])
            if line.get("step_ms") and line.get("compute_ms") and variant is not None:
                yield line


def _place(line: dict[str, Any]) -> tuple[int, int, str]:
    return line["hosts"], line["ranks_per_host"], line["rate"]


def _file(folder: Path, hosts: int, per_host: int, rate: str) -> Path:
    return folder / f"plan-{hosts}x{per_host}-{rate}.json"


def _measure(folder: Path, hosts: int, per_host: int, rate: str) -> None:
    """Runs `gossamer plan --measure` on hosts of the lab."""
    flags = ["plan", "--measure", "--json", "--params", "1e6", "--compute-ms", "1"]
    command = [sys.executable, "-m", "gossamer.launch.cli", *flags]
    outputs = run_on_hosts(command, hosts, rate=rate, ranks_per_host=per_host, shown=[0])
    found = json.loads(outputs[0].stdout.splitlines()[0])
    _file(folder, hosts, per_host, rate).write_text(json.dumps(found, indent=1) + "\n")


def _measured(folder: Path, line: dict[str, Any]) -> tuple[Network, Speeds]:
    """Bandwidths between hosts are nominal, so that they are not fitted; headers take their share."""
    path = _file(folder, *_place(line))
    if not path.exists():
        sys.exit(f"validate_planner: {path} is missing; --measure makes it")
    found = json.loads(path.read_text())
    codecs = {name: CodecSpeed(**each) for name, each in found["speeds"].pop("codecs").items()}
    network = {name: found["inputs"][name] for name in Network.__dataclass_fields__}
    network |= {"bandwidth": parse_rate(line["rate"]), "payload": TCP_SHARE}
    return Network(**network), Speeds(codecs, **found["speeds"])


def _compared(folder: Path, line: dict[str, Any], cores: float) -> dict[str, Any]:
    """Predicts what a line has measured, for the same algorithm object that was measured."""
    network, speeds = _measured(folder, line)
    variant = VARIANTS[line["algorithm"]]
    problem = _problem(line, variant, cores / network.ranks, speeds)
    if variant.ours is not None:
        found = predict(problem, network, variant.ours(), flat=variant.flat)
    elif variant.wrap is not None:
        found = predict(problem, network, line["algorithm"])
    else:
        found = predict(problem, network, Stock(HOOKS[line["algorithm"]], period=variant.period))
    fields = (
        "algorithm",
        "hosts",
        "ranks_per_host",
        "rate",
        "model",
        "compute_ms",
        "step_ms",
        "bytes_per_step",
    )
    row = {field: line[field] for field in fields}
    row |= {"predicted_ms": 1e3 * found.step_s, "predicted_bytes": found.bytes_per_rank}
    return row | {"error": 1e3 * found.step_s / line["step_ms"] - 1}


def _problem(line: dict[str, Any], variant: Variant, cores: float, speeds: Speeds) -> Problem:
    sizes = config.current()
    first, other = sizes.first_bucket_bytes, sizes.bucket_bytes
    if variant.bucket_cap_mb is not None:
        first = other = variant.bucket_cap_mb << 20
    module = TASKS[line["model"]]().model()
    settings = {"bucket_bytes": other, "first_bucket_bytes": first, "cores": cores, "speeds": speeds}
    return of_module(module, line["compute_ms"] / 1e3, **settings)


def _show(rows: list[dict[str, Any]]) -> None:
    for where in dict.fromkeys((row["hosts"], row["ranks_per_host"], row["model"]) for row in rows):
        here = [row for row in rows if (row["hosts"], row["ranks_per_host"], row["model"]) == where]
        rates = list(dict.fromkeys(row["rate"] for row in here))
        table = Table(
            "algorithm", title=f"{where[0]} hosts x {where[1]}, {where[2]}: predicted / measured, ms"
        )
        for rate in rates:
            table.add_column(rate, justify="right")
        for name in dict.fromkeys(row["algorithm"] for row in here):
            cells = {row["rate"]: row for row in here if row["algorithm"] == name}
            table.add_row(name, *(_cell(cells.get(rate)) for rate in rates))
        console = Console(highlight=False)
        console.width = max(110, console.width)
        console.print(table)


def _cell(row: dict[str, Any] | None) -> str:
    return f"{row['predicted_ms']:.0f} / {row['step_ms']:.0f} ({row['error']:+.0%})" if row else ""


if __name__ == "__main__":
    sys.exit(main())
