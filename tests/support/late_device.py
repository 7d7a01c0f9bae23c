"""The simulated device of tests/cpp/device as torch's device "late". It is compiled on first use, into build/.

For a process of its own: see tests/late/test_late.py.
"""

import fcntl
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from shlex import quote
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

import gossamer as gs
from gossamer import _C
from gossamer.comm import c10d
from gossamer.engine import connections, face
from tests import ROOT
from tests.support.ranks import run_threads

LATENESS = {"none": 0, "main": 1, "side": 2, "all": 3}


@functools.cache
def load() -> Any:
    """Returns the extension. Its first call makes the device "late" known to torch."""
    library = Path(_C.__file__)
    folder = ROOT / "build" / "late_device" / f"{torch.__version__}-{library.stem.split('.')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own lock stays after a compile that was killed
        # torch quotes no path that it gives to the linker.
        with mock.patch.object(cpp_extension, "TORCH_LIB_PATH", quote(cpp_extension.TORCH_LIB_PATH)):
            native = cpp_extension.load(
                name="late_device",
                sources=[str(ROOT / "tests" / "cpp" / "device" / "late_device.cpp")],
                extra_cflags=["-O0", "-std=c++20", "-fvisibility=hidden"],
                extra_ldflags=[quote(str(library)), quote(f"-Wl,-rpath,{library.parent}")],
                extra_include_paths=[str(ROOT / "csrc")],
                build_directory=str(folder),
            )
    torch.utils.rename_privateuse1_backend("late")
    module = types.ModuleType("torch.late")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        synchronize=lambda device=None: native.synchronize(),
    )
    torch._register_device_module("late", module)
    return native


@contextmanager
def late(which: str) -> Iterator[Any]:
    """Makes streams late: "main", the default stream; "side", all others; "all" or "none". Yields the extension."""
    native = load()
    native.set_late(LATENESS[which])
    try:
        yield native
    finally:
        native.settle()


def wired() -> Any:
    """Returns the extension. From now on models on the device "late" train in groups of Gloo, between processes.

    Their operations fail as NCCL's do: if a rank dies, they never end by themselves.
    """
    native = load()
    make_backend, ground_of = c10d.make_backend, c10d.ground_of

    def make_late_backend(kind: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        if kind != "nccl":
            return make_backend(kind, store, rank, size, timeout)
        return native.Wired(make_backend("gloo", store, rank, size, timeout))

    def ground_with_late(group: Any) -> c10d.Ground:
        ground = ground_of(group)
        ground.kinds["late"] = "nccl"
        return ground

    c10d.make_backend, c10d.ground_of = make_late_backend, ground_with_late
    connections.device_of = face.device_of = lambda module: next(module.parameters()).device
    return native


def wired_pair(timeout_s: float | None = None) -> list[gs.comm.Communicator]:
    """Two ranks: one on the device, whose host waits for each operation up to a time if given, and one on the CPU."""
    native, store = load(), dist.HashStore()

    def connect(rank: int) -> gs.comm.Communicator:
        wire = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        backend, device = (native.Wired(wire), "late:0") if rank == 0 else (wire, "cpu")
        made = gs.comm.from_backend(backend, device=device, store=store, name="pair")
        if timeout_s is not None:
            made.wait_on_host(timedelta(seconds=timeout_s))
        return made

    return run_threads(2, connect)


def communicator(size: int = 2, device: str = "late:0") -> gs.comm.Communicator:
    """Returns rank 0's communicator of `size` ranks with equal values over the backend of the simulated device."""
    return gs.comm.from_backend(load().Backend(0, size), device=device)


LEVELS = {"world": 4, "inside": 2, "across": 2, "back": 2}


def by_hosts(level: Callable[[str, int], gs.comm.Communicator]) -> gs.comm.Communicator:
    """Returns rank 0's communicator of two hosts of two ranks, whose sums overlap. `level` makes each of LEVELS."""
    world, inside, across, back = (level(*of) for of in LEVELS.items())
    return _C.ByHosts(world, inside, across, [[0, 1], [2, 3]], back)
