# `gossamer doctor`: examines the ranks of the job that it runs in, or of a job that it starts (-np, -H), or this
# machine alone, and prints the findings. facts.py and meeting.py collect facts, the checks of checks.py judge them.
# launch/cli.py and `python -m gossamer.doctor` call it.
"""The ``gossamer doctor`` command."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossamer import config
from gossamer.config import Placement
from gossamer.doctor import checks, facts, meeting
from gossamer.doctor.rows import ERROR, OK, WARNING, Job, Row
from gossamer.errors import ConfigError, GossamerError
from gossamer.launch import workers

EXAMPLES = """\
examples:
  gossamer doctor                          this machine
  gossamer doctor -np 4                    four workers on this machine, and what is between them
  gossamer doctor -np 4 -H a:2,b:2         two on each of two hosts, over ssh
  gossamer run -np 4 -H a:2,b:2 -m gossamer.doctor
                                           the same inside a job; torchrun -m gossamer.doctor does too
  gossamer doctor --json > findings.jsonl  a line of JSON for each finding
exit code: 1 if there is an error, 0 otherwise (warnings too)
"""
COLOURS = {OK: "green", WARNING: "yellow", ERROR: "red"}
WIDTH = 120  # columns of the table if there is no terminal
ALONE = Placement("alone", 0, 1, 0, 1)


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Checks this machine, or all workers of a job, for what slows or breaks training: versions, GPUs, "
        "the network device that Gloo takes, ports on public addresses, shared memory, cores, limits, variables, "
        "clocks, MTU, and latency and bandwidth between each pair of hosts. Says what to do about each finding.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    workers.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each finding, and no table")
    parser.add_argument("--no-network", action="store_true", help="do not measure latency and bandwidth")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS",
                        help="for all workers to meet, to join a group, and to answer (%(default)s)")  # fmt: skip
    return parser


def main(args: argparse.Namespace) -> int:
    """Examines, prints the findings, and returns 1 if one of them is an error."""
    if not args.timeout > 0:
        raise ConfigError(f"--timeout: must be above 0 seconds, got {args.timeout}")
    job = examined(args)
    if job is None:  # another rank prints
        return 0
    rows = checks.run(job)
    if args.json:
        for row in rows:
            print(json.dumps(vars(row)), flush=True)
    else:
        show(rows)
    return int(any(row.status == ERROR for row in rows))


def examined(args: argparse.Namespace) -> Job | None:
    """Returns what is to be judged; None on ranks other than 0. Workers that do not start are a finding too."""
    settings: dict[str, Any] = {"timeout_s": args.timeout, "network": not args.no_network}
    try:
        found = workers.on_workers(meeting.examine, settings, nproc=args.nproc, hosts=args.hosts)
    except GossamerError as error:
        if _rank() != 0:
            raise
        return Job([facts.collect(ALONE)], [f"{type(error).__name__}: {error}"])
    return found if isinstance(found, Job) else None


def show(rows: list[Row]) -> None:
    """Prints the table of findings and the number of errors and warnings on stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table("check", "status", "finding", "what to do")
    for row in rows:
        status = Text(row.status, style=COLOURS[row.status])
        table.add_row(Text(row.check), status, Text(row.finding), Text(row.advice))
    console.print(table)
    errors, warnings = (sum(row.status == status for row in rows) for status in (ERROR, WARNING))
    console.print(f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}")


def _rank() -> int:
    try:
        placement = config.launcher_environment()
    except ConfigError:  # wrong variables are a finding
        return 0
    return 0 if placement is None else placement.rank
