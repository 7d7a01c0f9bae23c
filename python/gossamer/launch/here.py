# The workers of this host. torch's agent (torchrun) starts, watches and restarts them in this process. This file
# fills in what torchrun leaves to the user: the rendezvous on one host, prefixed output, threads per worker. run.py
# calls it if all workers are on this host, and agent.py on each of several hosts.
"""Running the workers of one host."""

import argparse
import json
import os
import re
import signal
import tempfile
import uuid
import warnings
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from gossamer.errors import ConfigError
from gossamer.launch import rendezvous
from gossamer.launch.outcome import Outcome, failure_of
from gossamer.launch.output import splitting
from gossamer.launch.quiet import quieten_torch

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_S = 60  # for this process to reach the store that it serves itself


def run(args: argparse.Namespace) -> Outcome:
    """Runs torch's agent for the workers of this host, in this process."""
    was_ended = quieten_torch(restarts=args.max_restarts)
    workers = workers_of(str(args.nproc_per_node))
    with scratch() as folder, splitting(args, workers):
        _complete(args, workers, folder)
        try:
            torchrun.run(args)
        except ChildFailedError as error:
            found = error.failures.items()
            return Outcome(
                [failure_of(rank, each, ended_by_agent=was_ended(each.pid)) for rank, each in found]
            )
        except SignalException as error:
            return Outcome(stopped_by=int(error.sigval))
        except KeyboardInterrupt:
            return Outcome(stopped_by=int(signal.SIGINT))
    return Outcome()


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for the files of one run. Raises ConfigError if there is no place for one."""
    try:
        return tempfile.TemporaryDirectory(prefix="gossamer-run-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"a folder for temporary files must be writable, got {error}; set TMPDIR to one"
        ) from error


def forgive_open_logs(folder: str) -> None:
    """Ignores the warnings about logs of workers: torch closes those of a worker only if it is there at the end."""
    warnings.filterwarnings("ignore", f"unclosed file .*{re.escape(folder)}", ResourceWarning)


def threads_for(workers: int) -> dict[str, str]:
    """Returns OMP_NUM_THREADS with which this many workers share the cores, or nothing if the user has set it."""
    cores = len(os.sched_getaffinity(0))
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, cores // workers))}


def _complete(args: argparse.Namespace, workers: int, folder: str) -> None:
    """Fills in the options that the user left open."""
    rendezvous_given = args.rdzv_backend != "static" or args.rdzv_endpoint or args.master_port is not None
    if args.nnodes in ("1", "1:1") and not rendezvous_given:
        args.rdzv_id = uuid.uuid4().hex
        rendezvous.choose(args, address="127.0.0.1", port=0, timeout_s=TIMEOUT_S)
    if (args.tee, args.redirects) == ("0", "0"):
        args.tee = "3"  # torchrun prefixes only what it tees: stdout and stderr, through files
        args.log_dir = args.log_dir or folder
        forgive_open_logs(args.log_dir)
    os.environ.update(threads_for(workers))
    if args.run_path:
        return
    args.training_script_args = worker_arguments(args)
    args.training_script, args.module, args.no_python = str(WORKER), False, False


def worker_arguments(args: argparse.Namespace) -> list[str]:
    """Returns the arguments of worker.py: what torchrun's variables do not hold, as JSON, and the command."""
    names = ("as_horovod", "as_bagua", "no_python", "module", "slots", "host_name", "attempt")
    flags = {name: getattr(args, name) for name in names}
    return [json.dumps(flags), args.training_script, *args.training_script_args]


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
