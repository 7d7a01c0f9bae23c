# `gossamer run`: torchrun with better manners. It fills in what torchrun leaves to the user (single-host
# rendezvous, prefixed output, threads per worker) and ends with the first failure's own traceback.
# Starting, watching and restarting workers is torch.distributed.run's; its options pass through unchanged.
"""The ``gossamer run`` command."""

import argparse
import math
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gossamer.errors import ConfigError

WORKER = Path(__file__).with_name("worker.py")
NOTICE_S = 5  # a killed worker may be noticed this much later than the errors it causes
EXAMPLES = """\
examples:
  gossamer run -np 4 train.py --epochs 3        four workers on this host
  gossamer run -np 4 -m package.train           a module instead of a file
  gossamer run -np 8 --max-restarts 2 train.py  start all again after a failure, twice at most
  gossamer run --nnodes 2 -np 8 --rdzv-backend c10d --rdzv-endpoint host0:29400 train.py
                                                the same command on each of two hosts
"""


def build_parser(prog: str) -> argparse.ArgumentParser:
    """torchrun's own parser, so that every option of the installed torch is known, and -np."""
    parser = torchrun.get_args_parser()
    parser.prog = prog
    parser.description = "Starts a training script in several workers; one that fails ends all."
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "-np",
        "--np",
        dest="nproc_per_node",
        default=argparse.SUPPRESS,
        metavar="N",
        help="workers on this host: a number, cpu, gpu or auto (same as --nproc-per-node)",
    )
    return parser


def main(args: argparse.Namespace) -> int:
    """Starts the workers, waits, and returns 0, the failed worker's exit code, or 128 + its signal."""
    with ExitStack() as stack:
        _complete(args, stack)
        try:
            torchrun.run(args)
        except ChildFailedError as error:
            return _report(error)
        except SignalException as error:
            print(f"gossamer run: stopped by {error.sigval.name}; all workers ended", file=sys.stderr)
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            print("gossamer run: stopped by SIGINT; all workers ended", file=sys.stderr)
            return 128 + signal.SIGINT
    return 0


def _complete(args: argparse.Namespace, stack: ExitStack) -> None:
    """Fills in what the user left open. What was given is kept."""
    rendezvous_given = args.rdzv_backend != "static" or args.rdzv_endpoint or args.master_port is not None
    if args.nnodes in ("1", "1:1") and not rendezvous_given:
        args.standalone = True
    if (args.tee, args.redirects) == ("0", "0"):
        args.tee = "3"  # torchrun prefixes only what it tees: stdout and stderr, through files
        os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
        if args.log_dir is None:
            folder = tempfile.TemporaryDirectory(prefix="gossamer-run-", ignore_cleanup_errors=True)
            args.log_dir = stack.enter_context(folder)
    workers = _local_workers(str(args.nproc_per_node))
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // workers))
    if not (args.no_python or args.run_path):
        target = ["-m", args.training_script] if args.module else [args.training_script]
        args.training_script_args = [*target, *args.training_script_args]
        args.training_script, args.module = str(WORKER), False


def _local_workers(wanted: str) -> int:
    try:
        workers = int(torchrun.determine_local_world_size(wanted))
    except ValueError:
        workers = 0
    if workers < 1:
        raise ConfigError(f"-np must be a positive number, cpu, gpu or auto, got {wanted!r}")
    return workers


def _report(error: ChildFailedError) -> int:
    """Prints the root cause last on stderr: the first worker that failed, and its traceback."""
    rank, failure = min(error.failures.items(), key=lambda item: _failed_at_ns(item[1]))
    others = ", ".join(str(other) for other in sorted(error.failures) if other != rank)
    extra = _extra(failure)
    if failure.exitcode < 0 and not extra:
        what = f"was killed by signal {-failure.exitcode} ({failure.signal_name()})"
        code = 128 - failure.exitcode
    else:
        # An exception is reported as such even if the agent's own SIGTERM came before the exit.
        code = failure.exitcode if failure.exitcode > 0 else 1
        what = f"failed with exit code {code}"
    also = f" (then rank {others} ended too)" if others else ""
    print(f"gossamer run: rank {rank} {what}{also}", file=sys.stderr)
    if extra.get("py_callstack"):
        print(extra["py_callstack"].rstrip(), file=sys.stderr)
    return code


def _failed_at_ns(failure: ProcessFailure) -> float:
    """When a worker failed, for finding the first. torch's own times are whole seconds."""
    if "time_ns" in (extra := _extra(failure)):
        return int(extra["time_ns"])
    if failure.exitcode == -signal.SIGTERM:
        return math.inf  # how the agent ends the others
    # Died without a word; the agent saw it only after peers had lost the connection and said so.
    return (failure.timestamp - NOTICE_S) * 1e9


def _extra(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}
