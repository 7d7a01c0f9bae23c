# A benchmark is a module with add_arguments(parser), run(options) -> int, EXAMPLES for --help, and a docstring with
# which --help begins. It is imported only when it is used. launch/cli.py calls build_parser and main.
"""The ``gossamer bench`` command."""

import argparse
import importlib
import shlex

from gossamer.launch.cli import Command, listing

SUBCOMMANDS = {
    "allreduce": Command(
        "gossamer.bench.allreduce", "an all-reduce of each size, on each backend and with each codec"
    ),
    "codec": Command("gossamer.bench.codec", "each codec: speed, error and bytes on this machine"),
    "network": Command(
        "gossamer.netlab.comparison.command",
        "a training step of each algorithm and of torch's hooks over slow links; Linux, root",
    ),
    "train": Command(
        "gossamer.bench.train", "a training step of a small GPT under each algorithm, beside torch's DDP"
    ),
}


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Returns a parser of the benchmark's name. The benchmark's own parser takes the other arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measures on this machine, or inside a job on its workers. Results: JSON lines on stdout, "
        "a table on stderr.",
        epilog=f"benchmarks:\n{listing(SUBCOMMANDS)}\n\n`{prog} NAME --help` explains one, with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=SUBCOMMANDS, metavar="NAME", help=" or ".join(SUBCOMMANDS))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of that benchmark")
    parser.set_defaults(prog=prog)
    return parser


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark that was named, and returns the exit code."""
    module = importlib.import_module(SUBCOMMANDS[args.name].module)
    parser = argparse.ArgumentParser(
        prog=f"{args.prog} {args.name}",
        description=module.__doc__,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(command=shlex.join([*args.prog.split(), args.name, *args.rest]))  # for the lines
    return int(module.run(parser.parse_args(args.rest)))
