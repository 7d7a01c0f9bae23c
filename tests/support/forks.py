"""Processes that are forks of one that has imported torch and gossamer: a start takes milliseconds, not seconds.

For tests whose claim does not depend on a fresh interpreter. The process that forks is multiprocessing's forkserver;
each of pytest's processes has one. A fork has the environment, the folder and the standard streams that its caller
gives, and it ends as an interpreter does. All forks of one server have the same hash seed.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from tests import ROOT

PR_SET_PDEATHSIG = 1
FRESH = multiprocessing.get_context("spawn")
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.run", "gossamer", "pytest"])


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become(environment: Mapping[str, str], folder: str | Path, *streams: Path) -> None:
    """Gives this process its environment, its folder, and files as its standard output and errors.

    It ends when pytest's process ends.
    """
    die_with_parent()  # the server, which ends with pytest's process unless a fork keeps this pipe open
    if forkserver._forkserver._forkserver_alive_fd is not None:
        os.close(forkserver._forkserver._forkserver_alive_fd)
        forkserver._forkserver._forkserver_alive_fd = None
    os.chdir(folder)
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(environment)
    for standard, path in enumerate(streams, 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, standard)
        os.close(file)
    faulthandler.register(signal.SIGUSR1)
    if "OMP_NUM_THREADS" in environment:  # too late for the library, which has read it
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def leave(code: int) -> NoReturn:
    """Ends this process as an interpreter ends. multiprocessing would skip that in a fork."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("Py_Exit returned")


class Script:
    """A running fork that does what ``python argv...`` does; ``finish`` returns (exit code, stdout, stderr)."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], folder: Path, *, fresh: bool = False
    ) -> None:
        self._streams = tempfile.TemporaryDirectory(prefix="fork")
        self._out, self._err = (Path(self._streams.name) / name for name in ("out", "err"))
        arguments = ([str(part) for part in argv], dict(environment), folder, self._out, self._err)
        self.process = (FRESH if fresh else FORKED).Process(target=_script, args=arguments)
        self.process.start()

    def finish(self, timeout_s: float = 180) -> tuple[int, str, str]:
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            raise TimeoutError(f"a script did not end in {timeout_s} s; it printed:\n{self.printed()}")
        return self.process.exitcode, *self.printed()

    def printed(self) -> tuple[str, str]:
        """Its standard output and errors up to now."""
        out, err = (path.read_text() if path.exists() else "" for path in (self._out, self._err))
        return out, err

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._streams.cleanup()


def _script(argv: list[str], environment: dict[str, str], folder: Path, output: Path, errors: Path) -> None:
    become(environment, folder, output, errors)
    leave(run_script(argv))


def run_script(argv: list[str]) -> int:
    """Does what ``python argv...`` does. Returns the exit code."""
    code: Any = 0
    try:
        _run(argv)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        code = 1
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    return code


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


def place(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank, with its store at ``port``, outside the ranks."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "OMP_NUM_THREADS": "1",
    }


def fork_job(script: str, size: int, folder: Path, *arguments: str) -> str:
    """As ranks.run_job, with forks for ranks above 0, and without torchrun. Returns what they printed, errors too."""
    import torch.distributed as dist

    file = folder / "job.py"
    file.write_text(script)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    scripts: list[Script] = []
    try:
        for rank in range(size):
            environment = {**os.environ, "PYTHONPATH": python, **place(rank, size, store.port)}
            scripts.append(
                Script([str(file), *arguments], environment, Path.cwd(), fresh=rank == 0 < size - 1)
            )
        left, until = {script.process.sentinel: script.process for script in scripts}, time.monotonic() + 200
        while left and time.monotonic() < until:
            for sentinel in wait(list(left), 1):
                process = left.pop(sentinel)
                process.join(10)
                if process.exitcode != 0:
                    until = min(until, time.monotonic() + 10)  # torchrun would end the others
        codes = [script.process.exitcode for script in scripts]
        printed = ["".join(script.printed()) for script in scripts]
        assert codes == [0] * size, f"ranks ended with exit codes {codes}:\n" + "\n".join(printed)
        return "".join(printed)
    finally:
        for script in scripts:
            script.end()
