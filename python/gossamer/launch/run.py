# `gossamer run`: the command's flags, and the choice of who starts the workers: here.py on this host, fleet.py on
# several hosts, elastic/ where workers may come and go. torchrun's options pass through unchanged. horovodrun's flags
# are in horovod_flags.py, those for several hosts in hosts.py.
"""The ``gossamer run`` command."""

import argparse
import os
import shutil
import sys

from torch.distributed import run as torchrun

from gossamer.errors import ConfigError
from gossamer.launch import fleet, here, horovod_flags, hosts, outcome
from gossamer.launch.elastic import command as elastic
from gossamer.launch.outcome import Outcome

EXAMPLES = """\
examples:
  gossamer run -np 4 train.py --epochs 3        four workers on this host
  gossamer run -np 4 -m package.train           a module instead of a file
  gossamer run -np 8 --max-restarts 2 train.py  start all again after a failure, twice at most
  gossamer run --min-np 2 --max-np 4 train.py   the others go on when a worker dies
  gossamer run -np 6 -H localhost:4,other:2 train.py
                                                four workers here, two on the host `other`, over ssh
  gossamer run -np 2 --timeline trace.json train.py
                                                what all ranks did, for ui.perfetto.dev
  gossamer run -np 4 --as-horovod train.py      a script that says `import horovod.torch`, unchanged
  gossamer run -np 4 --as-bagua train.py        the same with `import bagua.torch_api`
  gossamer run --nnodes 2 -np 8 --rdzv-backend c10d --rdzv-endpoint host0:29400 train.py
                                                the same command on each of two hosts
"""


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Returns torchrun's own parser, which knows every option of the installed torch, with our flags added."""
    parser = torchrun.get_args_parser()
    parser.prog = prog
    parser.description = "Starts a training script in several workers; one that fails ends all."
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("-np", "--np", "--num-proc", dest="num_proc", metavar="N",
        help="workers: with -H or --hostfile on all hosts together; else on this host (a number, cpu, gpu or auto; "
        "same as --nproc-per-node)")  # fmt: skip
    add("--as-horovod", action="store_true",
        help="`import horovod.torch` in the script finds gossamer.horovod.torch")  # fmt: skip
    add("--as-bagua", action="store_true", help="`import bagua.torch_api` in the script finds "
        "gossamer.bagua.torch_api, and model.with_bagua() works")  # fmt: skip
    add("--timeline", metavar="FILE", help="rank 0 writes there, at the end, what Gossamer did on all ranks: "
        "a Chrome trace (GOSSAMER_TIMELINE)")  # fmt: skip
    elastic.add_arguments(parser)
    hosts.add_arguments(parser)
    horovod_flags.add_arguments(parser)
    # fleet.py sets the first three for each host; function.py sets payload, a folder to carry along.
    parser.set_defaults(slots=None, host_name=None, attempt=0, payload=None)
    return parser


def main(args: argparse.Namespace) -> int:
    """Starts the workers, waits, and returns 0, the failed worker's exit code, or 128 + its signal."""
    prepare(args)
    return outcome.report(start(args))


def prepare(args: argparse.Namespace) -> None:
    """Puts flags into the environment, which the workers inherit, and refuses flags that cannot be met."""
    horovod_flags.apply(args)
    hosts.export(args)
    if args.timeline is not None:
        os.environ["GOSSAMER_TIMELINE"] = os.path.abspath(args.timeline)
    _check_command(args)


def start(args: argparse.Namespace) -> Outcome:
    """Starts the workers where the flags ask for them, and waits for all."""
    if elastic.asked_for(args):
        return elastic.start(args, here.worker_arguments(args))
    chosen = hosts.chosen(args)
    if chosen is not None and not (len(chosen) == 1 and chosen[0].is_local()):
        return fleet.run(args, chosen)
    if chosen is not None:
        args.nproc_per_node, args.host_name = str(chosen[0].slots), chosen[0].name
    elif args.num_proc is not None:
        if args.nproc_per_node not in ("1", str(args.num_proc)):
            raise ConfigError(
                f"-np and --nproc-per-node must agree, got {args.num_proc} and {args.nproc_per_node}"
            )
        args.nproc_per_node = str(args.num_proc)
    return here.run(args)


def _check_command(args: argparse.Namespace) -> None:
    """Removes `python` from the front of a command, where horovodrun's users write it. Refuses other programs."""
    command = args.training_script
    pythons = ("python", "python3", "python{}.{}".format(*sys.version_info))
    named = command == sys.executable or (command in pythons and not os.path.isfile(command))
    if named and not args.no_python and not args.module:
        # Workers are unbuffered anyway.
        rest = [argument for argument in args.training_script_args if argument != "-u"]
        args.module = rest[:1] == ["-m"]
        del rest[: int(args.module)]
        if not rest or rest[0].startswith("-"):
            raise ConfigError(
                f"gossamer run starts scripts and modules by itself, got {command} {' '.join(rest)}; leave out "
                f"{command}, or set --no-python to run it as a program of its own"
            )
        args.training_script, args.training_script_args = rest[0], rest[1:]
    elif not (args.no_python or args.module or os.path.exists(command)) and shutil.which(command):
        raise ConfigError(
            f"gossamer run starts Python scripts, and {command} is a program; set --no-python to run it"
        )
    for flag, given in (("--as-horovod", args.as_horovod), ("--as-bagua", args.as_bagua)):
        if given and (args.no_python or args.run_path):
            raise ConfigError(
                f"{flag} needs a Python script or -m MODULE; leave out --no-python and --run-path"
            )
