# horovod.run(): runs a function in several workers. The function is pickled into a folder, `gossamer run` starts
# call.py with that folder, and the results are collected from it. fleet.py and agent.py carry the folder to other
# hosts and back. Only this part of the launcher is opened by a face: gossamer/horovod/runner.
"""``run(func, ...)``: a function in several workers."""

import importlib.util
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.errors import CommError, ConfigError
from gossamer.launch import here
from gossamer.launch import run as launcher
from gossamer.launch.outcome import Outcome, describe, first_failure

# torch's agent sets handlers for these signals and leaves them.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RemoteError(Exception):
    """The cause of an exception that a worker raised. Its text is the traceback in that worker."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"\nrank {rank}:\n{text}")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` in ``num_proc`` workers, and returns their results in the order of the ranks.

    The function is sent by cloudpickle if that is installed, which takes functions of scripts and notebooks. Otherwise
    it is sent by pickle, which takes only functions of modules. The workers get this process's ``sys.path``, its
    directory and its environment with ``env`` added. On other hosts they get the part of the environment that
    `gossamer run -H` carries.
    ``hosts`` ("a:2,b:2"), ``hostfile``, ``ssh_port``, ``ssh_identity_file``, ``start_timeout``, ``network_interface``,
    ``output_filename`` and ``verbose`` are flags of `gossamer run`; ``executable`` is another Python for the workers.
    ``use_gloo`` and ``disable_cache`` change nothing, because both are always so. ``np`` is an old name of
    ``num_proc``.

    Raises:
        ConfigError: arguments exclude each other or are not supported (MPI, elastic runs), or the function cannot be
            pickled.
        CommError: a worker was killed or ended by itself, or a host was not reached.
        Exception: the first exception of the function in any rank; its cause is the traceback there.
    """
    elastic = {"min_num_proc": min_num_proc or min_np, "max_num_proc": max_num_proc or max_np, "slots": slots}
    elastic |= {"reset_limit": reset_limit, "cooldown_range": cooldown_range}
    if given := {name: value for name, value in elastic.items() if value is not None}:
        why = "a function is not run elastically"
        raise ConfigError(f"horovod.run: {why}, got {given}; `gossamer run` does scripts")
    if use_mpi or mpi_args is not None:
        raise ConfigError(
            f"horovod.run: MPI does not start the workers, got use_mpi={use_mpi}, mpi_args={mpi_args!r}; "
            "leave them out, or start a script with mpirun"
        )
    flags = {
        "-np": np if np is not None and num_proc == 1 else num_proc,
        "-H": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "-p": ssh_port,
        "-i": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": network_interface,
    }
    if hosts is None and hostfile is None and (not isinstance(flags["-np"], int) or flags["-np"] < 1):
        raise ConfigError(f"horovod.run: num_proc must be at least 1, got {flags['-np']!r}")
    argv = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    argv += ["--verbose"] if verbose else []
    variables = dict(env or {}) | ({"PYTHON_EXEC": executable} if executable is not None else {})
    argv += [f"-x{name}={value}" for name, value in variables.items()]
    with here.scratch() as name:
        folder = Path(name)
        (folder / "call").write_bytes(_pickled((func, tuple(args), kwargs or {})))
        parsed = launcher.build_parser("horovod.run").parse_args([*argv, "-m", "gossamer.launch.call", name])
        parsed.payload = name
        with _unchanged():
            launcher.prepare(parsed)
            outcome = launcher.start(parsed)
        if outcome.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        if outcome.stopped_by or outcome.failures:
            raise _error(outcome, folder)
        return _results(folder, int(parsed.num_proc))


def _pickled(call: tuple[Any, ...]) -> bytes:
    pickler = "cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle"
    try:
        content = __import__(pickler).dumps(call)
    except Exception as error:
        hint = (
            "; install cloudpickle, which takes functions of scripts and lambdas"
            if pickler == "pickle"
            else ""
        )
        raise ConfigError(
            f"horovod.run: the function and its arguments must be such that {pickler} takes them: {error}{hint}"
        ) from error
    path = [os.path.abspath(entry) for entry in sys.path]
    return pickle.dumps({"pickler": pickler, "path": path, "call": content})


@contextmanager
def _unchanged() -> Iterator[None]:
    """Restores what a run changes in this process: the environment and the signal handlers."""
    variables = dict(os.environ)
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if in_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update(variables)


def _error(outcome: Outcome, folder: Path) -> BaseException:
    if not outcome.failures:
        return CommError(f"horovod.run: stopped by {signal.Signals(outcome.stopped_by).name}")
    first = first_failure(outcome.failures)
    try:
        pickled, text = pickle.loads((folder / f"error{first.rank}").read_bytes())
    except FileNotFoundError:
        told = f":\n{first.trace}" if first.trace else ""
        return CommError(f"horovod.run: {describe(outcome.failures)}{told}")
    error: BaseException = CommError(f"horovod.run: rank {first.rank}: {text}")
    if pickled is not None:
        error = pickle.loads(pickled)
    error.__cause__ = RemoteError(first.rank, text)
    return error


def _results(folder: Path, size: int) -> list[Any]:
    files = [folder / f"result{rank}" for rank in range(size)]
    if silent := [rank for rank, file in enumerate(files) if not file.exists()]:
        raise CommError(f"horovod.run: rank {', '.join(map(str, silent))} ended before the function returned")
    return [pickle.loads(file.read_bytes()) for file in files]
