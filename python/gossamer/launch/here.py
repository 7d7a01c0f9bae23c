# The workers of this host. torch's agent (torchrun) starts, watches and restarts them in this process. This file
# fills in what torchrun leaves to the user: the rendezvous on one host, prefixed output, threads per worker. run.py
# calls it if all workers are on this host, and agent.py on each of several hosts.
"""Running the workers of one host."""

import argparse
import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from gossamer.errors import ConfigError
from gossamer.launch import outcome
from gossamer.launch.outcome import Outcome
from gossamer.launch.output import splitting
from gossamer.launch.quiet import quieten_torch

WORKER = Path(__file__).with_name("worker.py")


def run(args: argparse.Namespace) -> Outcome:
    """Runs torch's agent for the workers of this host, in this process."""
    quieten_torch(restarts=args.max_restarts)
    with ExitStack() as stack:
        workers = workers_of(str(args.nproc_per_node))
        stack.enter_context(splitting(args, workers))
        _complete(args, workers, stack)
        try:
            torchrun.run(args)
        except ChildFailedError as error:
            return outcome.failed(error)
        except SignalException as error:
            return Outcome(stopped_by=int(error.sigval))
        except KeyboardInterrupt:
            return Outcome(stopped_by=int(signal.SIGINT))
    return Outcome()


def _complete(args: argparse.Namespace, workers: int, stack: ExitStack) -> None:
    """Fills in the options that the user left open."""
    rendezvous_given = args.rdzv_backend != "static" or args.rdzv_endpoint or args.master_port is not None
    if args.nnodes in ("1", "1:1") and not rendezvous_given:
        args.standalone = True
    if (args.tee, args.redirects) == ("0", "0"):
        args.tee = "3"  # torchrun prefixes only what it tees: stdout and stderr, through files
        if args.log_dir is None:
            folder = tempfile.TemporaryDirectory(prefix="gossamer-run-", ignore_cleanup_errors=True)
            args.log_dir = stack.enter_context(folder)
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // workers))
    if args.run_path:
        return
    args.training_script_args = worker_arguments(args)
    args.training_script, args.module, args.no_python = str(WORKER), False, False


def worker_arguments(args: argparse.Namespace) -> list[str]:
    """Returns the arguments of worker.py: its flags, which torchrun's variables do not hold, and the command."""
    switches = {
        "--as-horovod": args.as_horovod,
        "--as-bagua": args.as_bagua,
        "--exec": args.no_python,
        "--module": args.module,
    }
    flags = [flag for flag, given in switches.items() if given]
    if args.slots is not None:
        flags += ["--slots", ",".join(map(str, args.slots))]
    if args.host_name is not None:
        flags += ["--host-name", args.host_name]
    if args.attempt:
        flags += ["--attempt", str(args.attempt)]
    return [*flags, "--", args.training_script, *args.training_script_args]


def workers_of(wanted: str) -> int:
    """The number of workers that -np asks for on this host: a number, cpu, gpu or auto.

    Raises:
        ConfigError: anything else.
    """
    try:
        workers = int(torchrun.determine_local_world_size(wanted))
    except ValueError:
        workers = 0
    if workers < 1:
        raise ConfigError(f"-np must be a positive number, cpu, gpu or auto, got {wanted!r}")
    return workers
