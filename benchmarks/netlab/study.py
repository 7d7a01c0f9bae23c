"""The study of slow links, part by part: steps at three rates, time to a loss, and several ranks a host. Root is
needed.

    python benchmarks/netlab/study.py                 every part that has no results yet, then the targets
    python benchmarks/netlab/study.py steps-100mbit   this part, again
    python benchmarks/netlab/study.py targets         only judge what is there

It runs what `gossamer bench network` runs, and writes JSON lines and PNGs into results/ beside this file. Targets
that are missed are marked, and are no failure: judge them by the load in the lines.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gossamer.bench.measuring import emit, note, place, result
from gossamer.netlab import missing
from gossamer.netlab.comparison import command
from gossamer.netlab.comparison import lines as of

RESULTS = Path(__file__).resolve().parent / "results"
SEEDS = 3
RATE = "100mbit"  # that of the targets
SYNCHRONOUS = ("bytegrad", "int4", "onebit", "powersgd", "qadam", "onebit_adam")
LOCAL = ("local_sgd", "diloco", "streaming_diloco")
TRAINED = ("ddp", "ddp_fp16_hook", "bytegrad", "int4", "onebit", "powersgd", *LOCAL)
LEVELS = "ddp,gradient_allreduce,bytegrad,int4,flat,flat_bytegrad,flat_int4"

# Several ranks a host -> arguments, and what is asked of the defaults: bytes over stock DDP's at most, of ByteGrad and
# of an exact sum; and how many times stock DDP's step at least, ByteGrad and Int4.
LAYOUTS = {
    f"{hosts}x{per_host}-{rate}": (
        f"--hosts {hosts} --ranks-per-host {per_host} --rate {rate} --steps 10 --algorithms {LEVELS}",
        *asked,
    )
    for hosts, per_host, rate, *asked in (
        (2, 2, RATE, 0.18, 0.70, 4.6, 7),
        (2, 4, RATE, 0.155, 0.60, 4.8, 6.8),
        (4, 2, RATE, 0.23, None, 3.5, 5.2),
        (2, 2, "1gbit", 0.18, None, 2.2, None),
    )
}

# Part -> arguments of the command. A part about losses runs one seed at a time. Its steps end with a validation, so a
# variant that learns as stock DDP does reaches the loss after as many steps. With more steps the noise matters less.
PARTS = {
    **{f"steps-{rate}": f"--rate {rate} --steps 10" for rate in ("50mbit", "100mbit", "1gbit")},
    "steps-2-hosts": f"--hosts 2 --rate {RATE} --steps 10",
    "steps-cnn": f"--rate {RATE} --model cnn --steps 10",
    **{f"hosts-{layout}": flags for layout, (flags, *_) in LAYOUTS.items()},
    "loss-gpt": f"--to-loss --rate {RATE} --steps 192 --algorithms {','.join(TRAINED)}",
    "loss-2-hosts": f"--to-loss --hosts 2 --rate {RATE} --steps 192 --algorithms {','.join(TRAINED)}",
    "loss-cnn": f"--to-loss --rate {RATE} --model cnn --steps 144 --algorithms {','.join(TRAINED)}",
}


def measured(flags: str) -> tuple[argparse.Namespace, list[dict[str, Any]], list[dict[str, Any]]]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(shlex.split(flags))
    options.command = f"gossamer bench network {flags}"
    return options, *command.measure(options)


def run(part: str, folder: Path) -> None:
    """Measures a part anew; its lines and its picture go into the folder."""
    note(f"== {part}")
    if not part.startswith("loss"):
        options, lines, _ = measured(PARTS[part])
        command.draw(folder / f"{part}.png", options, lines, [])
        write(folder / f"{part}.jsonl", lines)
        return
    for seed in range(SEEDS):
        options, lines, curves = measured(f"{PARTS[part]} --first-seed {seed}")
        about = {
            key: lines[0][key]
            for key in ("hosts", "ranks_per_host", "rate", "model", "parameters", "rows", "lr")
        }
        write(curves_file(folder, part, seed), [{"about": about, **curve} for curve in curves])
    curves = [curve for seed in range(SEEDS) for curve in read(curves_file(folder, part, seed))]
    write(folder / f"{part}.jsonl", of.of_losses(curves, curves[0]["about"]))
    command.draw(folder / f"{part}.png", options, [], curves)


def curves_file(folder: Path, part: str, seed: int) -> Path:
    return folder / f"{part}-curves-{seed}.jsonl"


def write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def targets(folder: Path) -> list[dict[str, Any]]:
    """One line for each measured figure that has a target."""
    judged: list[dict[str, Any]] = []

    def judge(what: str, value: float, unit: str, **target: Any) -> None:
        judged.append(result(what, value, unit=unit, benchmark="netlab", **target) | place())

    # Two hosts have a core each, four share two; both save the same share of stock DDP's bytes.
    for hosts, steps, losses in ((4, f"steps-{RATE}", "loss-gpt"), (2, "steps-2-hosts", "loss-2-hosts")):
        where = f"gpt, {hosts} hosts, {RATE}"
        judge_hosts(judge, where, by_algorithm(folder, steps), by_algorithm(folder, losses))
    for layout, (_, *asked) in LAYOUTS.items():
        judge_levels(judge, layout, by_algorithm(folder, f"hosts-{layout}"), *asked)
    for part in PARTS:
        found = [line for line in read(folder / f"{part}.jsonl") if line.get("bytes_difference") is not None]
        if found:
            worst = max(found, key=lambda line: abs(line["bytes_difference"]))
            what = f"kernel's payload over Gossamer's bytes, less 1, {part}, worst: {worst['algorithm']}"
            judge(what, abs(worst["bytes_difference"]), "x", at_most=0.05)
    return judged


def by_algorithm(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    return {line["algorithm"]: line for line in read(folder / f"{part}.jsonl")}


def judge_levels(
    judge: Callable[..., None],
    layout: str,
    lines: dict[str, dict[str, Any]],
    bytes_at_most: float,
    exact_bytes_at_most: float | None,
    bytegrad_at_least: float,
    int4_at_least: float | None,
) -> None:
    """Judges the defaults where ranks share hosts."""
    for name, field, what, target in (
        ("bytegrad", "bytes_over_ddp", "bytes over ddp's", {"at_most": bytes_at_most}),
        ("gradient_allreduce", "bytes_over_ddp", "bytes over ddp's", {"at_most": exact_bytes_at_most}),
        ("bytegrad", "speedup_over_ddp", "times ddp's step", {"at_least": bytegrad_at_least}),
        ("int4", "speedup_over_ddp", "times ddp's step", {"at_least": int4_at_least}),
    ):
        if name in lines and None not in target.values():
            judge(f"{what}, {layout}, {name}", lines[name][field], "x", **target)
    for name, flat in (("gradient_allreduce", "flat"), ("bytegrad", "flat_bytegrad"), ("int4", "flat_int4")):
        if flat in lines:
            share = lines[name]["step_ms"] / lines[flat]["step_ms"]
            judge(f"step over that of one level, {layout}, {name}", share, "x", at_most=1.03)
            judge(
                f"step over limit and computing, {layout}, {name}",
                lines[name]["step_over_allowed"],
                "x",
                at_most=1,
            )


def judge_hosts(
    judge: Callable[..., None],
    where: str,
    steps: dict[str, dict[str, Any]],
    losses: dict[str, dict[str, Any]],
) -> None:
    for name in ("bytegrad", "int4"):
        if name in steps:
            judge(
                f"step over its byte limit, {where}, {name}",
                steps[name]["step_over_limit"],
                "x",
                at_most=1.15,
            )
    for name, peer, at_least in (
        ("bytegrad", "ddp", 3.6),
        ("bytegrad", "fp16_hook", 1.9),
        ("int4", "ddp", 6),
    ):
        if name in steps:
            judge(f"{name} over {peer}, {where}", steps[name][f"speedup_over_{peer}"], "x", at_least=at_least)
    best_of(judge, f"times ddp's step, {where}", steps, "speedup_over_ddp", ("onebit", "onebit_adam"), 15)
    best_of(judge, f"times sooner at ddp's loss, {where}, synchronous", losses, "ratio", SYNCHRONOUS, 5)
    best_of(judge, f"times sooner at ddp's loss, {where}, local", losses, "ratio", LOCAL, 30)


def best_of(
    judge: Callable[..., None],
    what: str,
    lines: dict[str, dict[str, Any]],
    field: str,
    names: Iterable[str],
    at_least: float,
) -> None:
    found = {name: lines[name][field] for name in names if name in lines}
    if found:
        best = max(found, key=lambda name: found[name])
        judge(f"{what}, best: {best}", found[best], "x", at_least=at_least)


def show(lines: list[dict[str, Any]]) -> None:
    table = Table("what", "figure", "target", "met")
    for line in lines:
        target = f">= {line['at_least']:g}" if line["at_most"] is None else f"<= {line['at_most']:g}"
        met = "[green]yes" if line["met"] else "[bold red]missed"
        table.add_row(line["what"], f"{line['value']:.4g}", target, met)
    Console(stderr=True).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join([*PARTS, 'targets'])}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (%(default)s)")
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS, "targets"}:
        parser.error(
            f"PART must be one of {', '.join([*PARTS, 'targets'])}, got {', '.join(sorted(unknown))}"
        )
    parts = options.parts or [part for part in PARTS if not (options.results / f"{part}.jsonl").exists()]
    if set(parts) & set(PARTS) and (why := missing()):
        print(f"netlab: {why}", file=sys.stderr)
        return 1
    for part in PARTS:
        if part in parts:
            run(part, options.results)
    judged = targets(options.results)
    write(options.results / "targets.jsonl", judged)
    for line in judged:
        emit(line)
    show(judged)
    return 0


if __name__ == "__main__":
    sys.exit(main())
