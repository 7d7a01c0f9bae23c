# Works without a terminal. Callers: the command.
"""The output of ``gossamer plan``: a table and sentences, or lines of JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gossamer.comm import goes_by_hosts
from gossamer.planner.advice import Advice
from gossamer.planner.methods import METHODS
from gossamer.planner.network import Network
from gossamer.planner.predict import Prediction
from gossamer.planner.problem import Problem, buckets_of
from gossamer.units import bytes_text, count_text, rate_text, seconds_text


@dataclass(frozen=True)
class Plan:
    """What the command shows. `what`: a text that describes the model. `paths`: the plots."""

    what: str
    problem: Problem
    network: Network
    predictions: Sequence[Prediction]
    advice: Advice
    paths: Sequence[Path]


def print_lines(plan: Plan) -> None:
    """Prints JSON: a line for the inputs, one for each prediction, one for the advice."""
    problem, network = plan.problem, plan.network
    inputs = {"model": plan.what, "parameters": problem.numel, "compute_s": problem.compute_s}
    inputs |= {"forward": problem.forward, "bucket_bytes": problem.bucket_bytes}
    inputs |= {**asdict(network), "by_hosts": goes_by_hosts(network.host_ranks)}
    print(json.dumps({"inputs": inputs, "speeds": asdict(problem.speeds)}))
    for prediction in plan.predictions:
        print(json.dumps({**prediction.as_dict(), "kind": METHODS[prediction.algorithm].kind}))
    print(json.dumps({**asdict(plan.advice), "plots": [str(path) for path in plan.paths]}))


def print_table(plan: Plan) -> None:
    """Prints a table and sentences, at least 100 columns wide where there is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(100, console.width)
    table = Table()
    table.add_column("algorithm", no_wrap=True)
    table.add_column("kind")
    for head in ("step", "exposed", "sent by\na rank", "leaving\na host", "compute\nof step"):
        table.add_column(head, justify="right")
    for p in plan.predictions:
        cells = seconds_text(p.step_s), seconds_text(max(0.0, p.exposed_s)), bytes_text(p.bytes_per_rank)
        marked = f"[bold]{p.algorithm}[/bold]" if p.algorithm == plan.advice.use else p.algorithm
        kind = METHODS[p.algorithm].kind
        table.add_row(marked, kind, *cells, bytes_text(p.bytes_across), f"{p.efficiency:.0%}")
    warnings = [f"warning: {warning}" for warning in plan.advice.warnings]
    plots = [f"plot: {path}" for path in plan.paths]
    for line in (*_inputs(plan.what, plan.problem, plan.network), table, plan.advice.why, *warnings, *plots):
        console.print(line, soft_wrap=line is not table)


def _inputs(what: str, problem: Problem, network: Network) -> list[str]:
    buckets = buckets_of(problem)
    lines = [
        f"{count_text(problem.numel)} parameters: {what}; {len(buckets)} buckets",
        f"{network.ranks} ranks on {network.hosts} host{'s' * (network.hosts > 1)}, {seconds_text(problem.compute_s)} "
        f"of compute a step, {problem.forward:.0%} of it before the backward",
    ]
    if network.hosts > 1:
        lines.append(f"between hosts {rate_text(network.bandwidth)}, {seconds_text(network.latency_s)}")
    if network.per_host > 1:
        lines.append(
            f"inside a host {rate_text(network.local_bandwidth)}, {seconds_text(network.local_latency_s)}"
        )
    if problem.speeds.through_host and network.per_host > 1:
        lines.append("no peer access: sums inside a host go through its memory")
    if goes_by_hosts(network.host_ranks):
        lines.append(
            "models go by hosts: exact sums inside each, codecs between them; gs.Flat() for one level"
        )
    return lines
