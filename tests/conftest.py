# Fixtures of all tests: a clean environment, one thread per process, and real worker processes.
# Ranks as threads, the default way to test collectives, are in tests/support/ranks.py.

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import ROOT
from tests.support import ranks
from tests.support.forks import Script
from tests.support.jobs import run_in_ranks

LAUNCHER_PREFIXES = (
    "GOSSAMER_",
    "HOROVOD_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "SLURM_",
    "TORCHELASTIC_",
    "OMP_",
)
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

settings.register_profile("gossamer", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("gossamer")
torch.set_num_threads(1)

# nohup, and a shell that runs pytest in the background, make it and its children ignore these; tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides a launcher's variables, in case pytest was started under one."""
    for name in list(os.environ):
        if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    ranks.let_go()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return run_in_ranks(pyfuncitem) or None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ranks.BACKENDS, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of run_ranks: tests that use this fixture run once on each."""
    ranks.choose_backend(request.param)
    yield request.param
    ranks.choose_backend("gloo")


class Started:
    """A running command; ``finish`` waits and returns (exit code, stdout, stderr)."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def finish(self, timeout_s: float = 180) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """``start(argv, env={...})`` runs ``python argv...`` in tmp_path; processes that are left at the end are killed."""
    running: list[subprocess.Popen[str]] = []

    def begin(argv: Sequence[str], *, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()):
        process = subprocess.Popen(
            [*prefix, sys.executable, *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return Started(process)

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """As ``start``, without the start of an interpreter: see tests/support/forks.py."""
    running: list[Script] = []

    def begin(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Script:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **(env or {})}
        running.append(Script(argv, environment, tmp_path))
        return running[-1]

    yield begin
    for script in running:
        script.end()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
