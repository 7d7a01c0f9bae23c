# The `gossamer` command: a table of subcommands. A subcommand is a module, imported only when it is used, that offers
# main(args) -> int, and either add_arguments(parser) or build_parser(prog).
"""The ``gossamer`` command line."""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gossamer import __version__
from gossamer.errors import GossamerError


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS = {
    "run": Command("gossamer.launch.run", "start a training script in several workers"),
    "plan": Command("gossamer.planner.cli", "predict the step time of every algorithm on a network"),
    "demo": Command("gossamer.demo.cli", "train a small GPT with 4 workers and 8-bit gradients"),
    "doctor": Command("gossamer.doctor.cli", "check this machine, or all workers of a job"),
    "bench": Command("gossamer.bench.cli", "measure all-reduces, codecs and training steps on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code. ``argv`` excludes the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = _top_parser().parse_args(arguments[:1]).command
    module = importlib.import_module(COMMANDS[chosen].module)
    prog = f"gossamer {chosen}"
    if hasattr(module, "build_parser"):
        parser = module.build_parser(prog)
    else:
        parser = argparse.ArgumentParser(prog=prog, description=COMMANDS[chosen].summary)
        module.add_arguments(parser)
    try:
        return int(module.main(parser.parse_args(arguments[1:])))
    except GossamerError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def listing(commands: Mapping[str, Command]) -> str:
    """Returns the lines of --help that name the commands."""
    width = max(map(len, commands))
    return "\n".join(f"  {name:{width}}  {command.summary}" for name, command in commands.items())


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gossamer",
        description="Trains one PyTorch model on many workers.",
        epilog=f"commands:\n{listing(COMMANDS)}\n\nexample: gossamer run -np 4 train.py --epochs 3\n"
        "`gossamer COMMAND --help` explains one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gossamer {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=" or ".join(COMMANDS))
    return parser


if __name__ == "__main__":
    sys.exit(main())
