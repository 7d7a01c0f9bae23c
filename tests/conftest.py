# Fixtures of all tests: a clean environment, one thread per process, and real worker processes.
# Ranks as threads, the default way to test collectives, are in tests/support/ranks.py.

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import gossamer as gs
from tests.support import quick_python, ranks
from tests.support.jobs import run_in_ranks
from tests.support.started import Started, starting

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

ROOMS_OF_LONG_TESTS = ("launch", "repository", "tools")

settings.register_profile("gossamer", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("gossamer")
torch.set_num_threads(1)

# nohup, and a shell that runs pytest in the background, make it and its children ignore these; tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Tests collect garbage often. What the imports have left need not be looked at each time."""
    gc.collect()
    gc.freeze()


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the rooms with the longest tests first: then short tests are the last, and xdist's workers end together."""
    items.sort(key=lambda item: item.path.parent.name not in ROOMS_OF_LONG_TESTS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ranks.BACKENDS, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of run_ranks: tests that use this fixture run once on each."""
    ranks.choose_backend(request.param)
    yield request.param
    ranks.choose_backend("gloo")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """The test's own process is the only rank of the default group."""
    gs.init()
    yield
    gs.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """``start(argv, env={...})`` runs ``python argv...`` in tmp_path; processes that are left at the end are killed."""
    with starting(sys.executable, tmp_path) as begin:
        yield begin


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """As ``start``, without the start of an interpreter: see tests/support/quick_python.py."""
    with starting(quick_python.program(), tmp_path) as begin:
        yield begin


@pytest.fixture
def forks_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes that the test's own process starts by sys.executable are forks, as those of ``fork`` are."""
    monkeypatch.setattr(sys, "executable", quick_python.program())


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
