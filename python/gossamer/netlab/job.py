# Runs a command on every host of a network, as some ranks on each, with the variables that a launcher would set, and
# returns what the ranks wrote. It restarts nothing. Used by `gossamer bench network`, the demo, benchmarks and tests.
"""Running a command on hosts."""

import contextlib
import ctypes
import os
import platform
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigError, GossamerError
from gossamer.netlab.hosts import DEVICE, Hosts

PORT = 29500  # of the store on host 0; free, because the namespace is new
# Numbers of the system call sched_setattr, for which Python has no function.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_SLICE_NS = 100_000
_POLL_S = 0.05
_TAIL = 4000


@dataclass(frozen=True)
class Output:
    """What one rank wrote."""

    rank: int
    host: int
    stdout: str
    stderr: str


def run_on_hosts(
    command: Sequence[str],
    hosts: int | Hosts,
    *,
    rate: str | None = None,
    ranks_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
    threads: int | None = None,
    timeout_s: float = 600,
    shown: Sequence[int] = (),
) -> list[Output]:
    """Runs the command once for each rank, waits for all, and returns what they wrote, in rank order.

    Ranks find the variables of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
    MASTER_PORT) and GLOO_SOCKET_IFNAME. OMP_NUM_THREADS shares this machine's cores evenly. The rest of the environment
    is the caller's. Each rank stays on its share of the cores. If there are fewer cores than ranks, several ranks share
    a core and take turns of 0.1 ms on it (some ms before Linux 6.12 and on machines other than x86 and ARM). So a rank
    receives without waiting long for the computing of another host. Ranks of host 0 come first. All ranks share the
    file system.

    Args:
        hosts: the number of hosts, which are removed afterwards, or `Hosts` that exist.
        rate: the rate of each host's link, if `hosts` is a number; see Hosts.
        environment: more variables.
        threads: OMP_NUM_THREADS instead.
        timeout_s: seconds in which all ranks must end.
        shown: ranks that write to the stderr of this process.

    Raises:
        ConfigError: as Hosts does.
        GossamerError: a rank failed or took too long. The message has its host, its rank and the end of its stderr. The
            other ranks are killed.
    """
    if ranks_per_host < 1:
        raise ConfigError(f"run_on_hosts: ranks_per_host must be at least 1, got {ranks_per_host}")
    if isinstance(hosts, Hosts) and rate is not None:
        raise ConfigError(f"run_on_hosts: the hosts have a rate of {hosts.rate} already, got rate={rate!r}")
    with contextlib.ExitStack() as stack:
        network = hosts if isinstance(hosts, Hosts) else stack.enter_context(Hosts(hosts, rate=rate))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        size = network.count * ranks_per_host
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // size)
        even = share if threads is None else threads
        own = {"OMP_NUM_THREADS": str(even), **(environment or {})}
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        for rank in range(size):
            streams: dict[str, Any] = {"stdout": stack.enter_context(open(folder / f"{rank}.out", "w"))}
            if rank not in shown:
                streams["stderr"] = stack.enter_context(open(folder / f"{rank}.err", "w"))
            place = _place(network, rank, ranks_per_host)
            variables = [f"{name}={value}" for name, value in (place | own).items()]
            line = [*network.prefix(rank // ranks_per_host), "env", *variables, *command]
            # A session of its own: Ctrl-C reaches this process only, which then ends them.
            ranks.append(subprocess.Popen(line, start_new_session=True, **streams))
            first = rank * share % len(cores)
            with contextlib.suppress(ProcessLookupError):  # it has ended, which _wait() tells
                os.sched_setaffinity(ranks[-1].pid, cores[first : first + share])
                _take_short_turns(ranks[-1].pid)
        failed, how = _wait(ranks, timeout_s)
        outputs = [
            Output(rank, rank // ranks_per_host, _text(folder / f"{rank}.out"), _text(folder / f"{rank}.err"))
            for rank in range(size)
        ]
    if failed is not None:
        errors = outputs[failed].stderr[-_TAIL:] or "(none)"
        told = "its errors are above" if failed in shown else f"the end of its errors:\n{errors}"
        raise GossamerError(f"run_on_hosts: rank {failed} on host {outputs[failed].host} {how}; {told}")
    return outputs


def _place(hosts: Hosts, rank: int, ranks_per_host: int) -> dict[str, str]:
    host, local = divmod(rank, ranks_per_host)
    place = {"RANK": rank, "WORLD_SIZE": hosts.count * ranks_per_host}
    place |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks_per_host, "GROUP_RANK": host}
    names = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICE}
    return {name: str(value) for name, value in place.items()} | names


def _take_short_turns(pid: int) -> None:
    """Makes a process, and all that it starts, take short turns on its core."""
    if _SCHED_SETATTR is None:
        return
    # struct sched_attr: size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period, two more.
    attributes = struct.pack("=IIQiIQQQII", 56, 0, 0, 0, 0, _SLICE_NS, 0, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).syscall(_SCHED_SETATTR, pid, attributes, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"sched_setattr of process {pid}: {os.strerror(number)}")


def _wait(ranks: "list[subprocess.Popen[bytes]]", timeout_s: float) -> tuple[int | None, str]:
    """Returns the rank that failed first, or is late, and how; None if all ranks have ended well."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank, f"ended with exit code {code}"
        if None not in codes:
            return None, ""
        if time.monotonic() > deadline:
            return codes.index(None), f"took more than {timeout_s:g} s"
        time.sleep(_POLL_S)


def _end(ranks: "list[subprocess.Popen[bytes]]") -> None:
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
