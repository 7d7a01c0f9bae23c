"""Processes that are forks of one that has imported torch and gossamer: a start takes milliseconds, not seconds.

For tests whose claim does not depend on a fresh interpreter. The process that forks is multiprocessing's forkserver. A
fork has the environment, the folder and the standard streams that its caller gives, and it ends as an interpreter does.

All forks of one server have the same hash seed, so each of pytest's processes has two servers. In a job, rank 0 is a
fork of the second one. Ranks then have different hash seeds, as in a real job, and a mistake that an order in a set
causes is found.
"""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests import ROOT

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.run", "gossamer", "pytest"]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(PRELOADED)
SECOND = forkserver.ForkServer()
SECOND.set_forkserver_preload(PRELOADED)
LIBC = ctypes.CDLL(None, use_errno=True)

Fork = FORKED.Process


class ForkOfSecond(Fork):
    """A fork of the second server."""

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802
        with mock.patch.object(forkserver, "connect_to_new_process", SECOND.connect_to_new_process):
            return Fork._Popen(process)


def kind_of(rank: int) -> type[Fork]:
    """Which of the two a rank of a job is."""
    return Fork if rank else ForkOfSecond


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(path: str, kind: int) -> None:
    """Moves this process into a namespace, of the kind that a flag of setns names."""
    with open(path) as namespace:
        if LIBC.setns(namespace.fileno(), kind):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {path}")


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
    gc.freeze()  # what the server has imported is of no interest to the collections of this process
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
    """A running fork that does what ``python argv...`` does; ``finish`` returns (exit code, stdout, stderr).

    Args:
        kind: Fork or ForkOfSecond.
        network: the network namespace of a host, instead of the caller's.
    """

    def __init__(
        self,
        argv: Sequence[object],
        environment: Mapping[str, str],
        folder: Path,
        *,
        kind: type[Fork] = Fork,
        network: str | None = None,
    ) -> None:
        self._streams = tempfile.TemporaryDirectory(prefix="fork")
        self._out, self._err = (Path(self._streams.name) / name for name in ("out", "err"))
        place = (dict(environment), folder, self._out, self._err)
        self.process = kind(target=_script, args=([str(part) for part in argv], network, *place))
        self.process.start()

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

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


def _script(argv: list[str], network: str | None, *place: Any) -> None:
    become(*place)
    if network is not None:
        enter(f"/run/netns/{network}", CLONE_NEWNET)
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
        return
    main = type(sys)("__main__")  # stays until the interpreter ends, as a script's globals do
    if argv[0] == "-c":
        code, file, sys.argv = argv[1], "<string>", ["-c", *argv[2:]]
        sys.path.insert(0, "")
    else:
        code, file, sys.argv = Path(argv[0]).read_text(), argv[0], argv
        main.__file__ = file
        sys.path.insert(0, str(Path(file).resolve().parent))
    sys.modules["__main__"] = main
    exec(compile(code, file, "exec"), main.__dict__)


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


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment of a rank: this process's, with ``place``, and with the tests on the path."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **place(rank, size, port)}


def until_all_end(
    scripts: Sequence[Script], *, limit_s: float = 200, grace_s: float = 10
) -> list[int | None]:
    """Returns the exit codes. Once a script has failed, the others have `grace_s` left; None is who runs on."""
    left, until = {script.process.sentinel: script.process for script in scripts}, time.monotonic() + limit_s
    while left and time.monotonic() < until:
        for sentinel in wait(list(left), 1):
            process = left.pop(sentinel)
            process.join(10)
            if process.exitcode != 0:
                until = min(until, time.monotonic() + grace_s)
    return [script.process.exitcode for script in scripts]


def fork_on_hosts(
    argv: Sequence[object],
    hosts: int,
    *,
    ranks_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
    killed: int | None = None,
) -> list[tuple[str, str]]:
    """As netlab.run_on_hosts, with forks, which the lab does not schedule. Returns each rank's (stdout, stderr).

    All ranks must end well, but for one that is `killed`.
    """
    from gossamer.netlab import Hosts, job

    with ExitStack() as stack:
        network = stack.enter_context(Hosts(hosts))
        scripts = []
        for rank in range(hosts * ranks_per_host):
            place = job._place(network, rank, ranks_per_host)
            scripts.append(
                Script(
                    argv,
                    {**os.environ, "OMP_NUM_THREADS": "1", **place, **(environment or {})},
                    Path.cwd(),
                    kind=kind_of(rank),
                    network=network.namespace(rank // ranks_per_host),
                )
            )
            stack.callback(scripts[-1].end)
        codes = until_all_end(scripts, grace_s=10 if killed is None else 60)
        printed = [script.printed() for script in scripts]
        expected = [-signal.SIGKILL if rank == killed else 0 for rank in range(len(scripts))]
        assert codes == expected, (codes, printed)
        return printed


def fork_job(script: str, size: int, folder: Path, *arguments: str) -> str:
    """As ranks.run_job, with forks and without torchrun. Returns what they printed, errors too."""
    import torch.distributed as dist

    file = folder / "job.py"
    file.write_text(script)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    scripts: list[Script] = []
    try:
        for rank in range(size):
            environment = rank_environment(rank, size, store.port)
            scripts.append(Script([file, *arguments], environment, Path.cwd(), kind=kind_of(rank)))
        codes = until_all_end(scripts)  # torchrun too would end the others of a rank that has failed
        printed = ["".join(script.printed()) for script in scripts]
        assert codes == [0] * size, f"ranks ended with exit codes {codes}:\n" + "\n".join(printed)
        return "".join(printed)
    finally:
        for script in scripts:
            script.end()
