# What one process sees of its machine: versions, devices, network, limits, variables. The checks judge these facts, and
# meeting.py sends them to rank 0. A probe that raises leaves its error in the place of the fact.
"""The facts that the checks of ``gossamer doctor`` look at."""

import contextlib
import glob
import os
import platform
import resource
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gossamer import _C, __version__, _ops, config
from gossamer.codec import Identity
from gossamer.config import Placement
from gossamer.errors import ConfigError
from gossamer.launch import addresses

# Of linux/sockios.h.
SIOCGIFFLAGS, SIOCGIFMTU = 0x8913, 0x8921
IFF_UP, IFF_LOOPBACK = 0x1, 0x8
PREFIXES = (
    "GOSSAMER_",
    "GLOO_",
    "TORCH_",
    "NCCL_",
    "OMP_",
    "HOROVOD_",
    "MASTER_",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "SLURM_",
)
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")


def collect(placement: Placement) -> dict[str, Any]:
    """Returns every fact of this process, in a form that JSON can hold."""
    found: dict[str, Any] = {"placement": vars(placement)}
    for name, probe in PROBES.items():
        try:
            found[name] = probe()
        except Exception as error:
            found[name] = {"broken": f"{type(error).__name__}: {error}"}
    return found


def host() -> dict[str, str]:
    """Returns the host's name, and an id that two processes share only if they share machine and network."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"name": socket.gethostname(), "id": f"{machine} {os.readlink('/proc/self/ns/net')}"}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "gossamer": __version__}


def extension() -> dict[str, Any]:
    """Returns where the native extension is, and whether one of its codecs decodes what it has encoded."""
    x = torch.arange(64, dtype=torch.float32)[None]
    _ops.decode(_ops.encode(x, Identity.kind, 1), Identity.kind, 1, out := torch.empty_like(x))
    return {
        "file": _C.__file__,
        "cuda": _ops.with_cuda,
        "instruction_set": _C.instruction_set(),
        "works": torch.equal(x, out),
    }


def cuda() -> dict[str, Any]:
    available = torch.cuda.is_available()
    devices = range(torch.cuda.device_count() if available else 0)
    return {
        "available": available,
        "built_for": torch.version.cuda,
        "driver": _driver(),
        "devices": [torch.cuda.get_device_name(index) for index in devices],
    }


def nccl() -> dict[str, Any]:
    """Returns NCCL's version if torch has NCCL and there is a GPU."""
    if not dist.is_nccl_available():
        return {"available": False, "version": None}
    version = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {"available": True, "version": ".".join(map(str, version)) if version else None}


def interfaces() -> list[dict[str, Any]]:
    """Returns the network devices that are up, each with its IPv4 address (or None) and its MTU."""
    found = []
    for _, name in socket.if_nameindex():
        flags = struct.unpack_from("H", addresses.request(SIOCGIFFLAGS, name) or bytes(32), 16)[0]
        if flags & IFF_UP:
            answer = addresses.request(SIOCGIFMTU, name)
            mtu = struct.unpack_from("i", answer, 16)[0] if answer else None
            device = {"name": name, "address": addresses.of_device(name), "mtu": mtu}
            found.append(device | {"loopback": bool(flags & IFF_LOOPBACK)})
    return found


def listening() -> list[dict[str, Any]]:
    """Returns where the store of the job listens on this host, and all that its launcher and this process serve."""
    placement = config.launcher_environment()
    if placement is None:
        return []
    serves = {"store": _sockets_of(os.getpid()), "launcher": _sockets_of(os.getppid())}
    found = []
    for address, port, inode in addresses.listeners():
        what = [name for name, inodes in serves.items() if inode in inodes]
        if port == placement.master_port:
            what = ["store"]
        found += [{"what": name, "address": address, "port": port} for name in what]
    return found


def shared_memory() -> dict[str, int] | None:
    """Returns the bytes of /dev/shm, or None without it."""
    if not os.path.isdir("/dev/shm"):
        return None
    stat = os.statvfs("/dev/shm")
    return {"bytes": stat.f_blocks * stat.f_frsize, "free": stat.f_bavail * stat.f_frsize}


def cores() -> dict[str, Any]:
    """Returns the cores that this process may use, its container's share of processor time, and torch's threads."""
    return {
        "usable": len(os.sched_getaffinity(0)),
        "quota": _quota(Path("/sys/fs/cgroup/cpu.max")),
        "threads": torch.get_num_threads(),
    }


def open_files() -> dict[str, int]:
    return dict(zip(("soft", "hard"), resource.getrlimit(resource.RLIMIT_NOFILE), strict=True))


def environment() -> dict[str, str]:
    """Returns the variables that launchers, torch's backends and Gossamer read."""
    every = config.variables("")
    return {name: text for name, text in every.items() if name.startswith(PREFIXES) or name in NAMES}


def refused_settings() -> str | None:
    """Returns why config.current() refuses the environment, or None if it accepts it."""
    try:
        config.current()
    except ConfigError as error:
        return str(error)
    return None


PROBES: dict[str, Callable[[], Any]] = {
    "host": host,
    "versions": versions,
    "extension": extension,
    "cuda": cuda,
    "nccl": nccl,
    "interfaces": interfaces,
    "resolved": addresses.of_own_name,
    "addresses": addresses.of_host,
    "listening": listening,
    "towards_master": lambda: addresses.towards(config.master_addr()),  # this host's address on the way there
    "shared_memory": shared_memory,
    "cores": cores,
    "open_files": open_files,
    "environment": environment,
    "refused_settings": refused_settings,
    "ssh": lambda: shutil.which("ssh"),
}


def _driver() -> str | None:
    """Returns the version of the NVIDIA driver from its kernel module, or None without one."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return None
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), first)


def _sockets_of(process: int) -> set[str]:
    """Returns the inodes of the sockets that a process holds; none if it belongs to another user."""
    inodes = set()
    for path in glob.glob(f"/proc/{process}/fd/*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(path).partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    return inodes


def _quota(file: Path) -> float | None:
    """Returns the control group's limit in cores, or None without a limit."""
    try:
        limit, period = file.read_text().split()
    except (OSError, ValueError):  # no control groups of version 2
        return None
    return None if limit == "max" else int(limit) / int(period)
