# Hosts as network namespaces. The eth0 of each is one end of a cable (veth) to a port of a bridge. The bridge has a
# namespace of its own, so that nothing changes outside. All of it is removed, however the `with` ends. This file starts
# no program on a host; job.py and prefix() are for that. shaping.py says how slow a cable is.
"""Network namespaces around a bridge, as hosts."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from gossamer import signals
from gossamer.errors import ConfigError
from gossamer.netlab.counters import Counters
from gossamer.netlab.shaping import Shape
from gossamer.units import parse_rate

DEVICE = "eth0"
"""The name of a host's only network device."""
# A container of a rank has its own IPC, mounts (so its own /dev/shm), process ids and host name.
_CONTAINER = ("unshare", "--ipc", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c")
# The shell stays as process 1 of the container, because process 1 cannot kill itself.
_OWN_FOLDERS = 'mount -t tmpfs none /dev/shm && hostname "host-$RANK" && "$@"; exit $?'
_MOST_HOSTS = 250  # the addresses of one network
_PATIENCE_S = 5.0
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)

_numbers = itertools.count()


def missing() -> str:
    """Says why no hosts can be made here, and what to do. Empty if they can be made."""
    if os.geteuid() != 0:
        return f"network namespaces need root, got user id {os.geteuid()}; run it with sudo"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"network namespaces need {program}; install iproute2"
    try:
        with Hosts(1, rate="1gbit"):
            return ""
    except ConfigError as error:
        return f"network namespaces are refused: {error}"


def no_containers() -> str:
    """Says why ranks cannot have containers of their own on a host. Empty if they can."""
    refused = _run(*_CONTAINER, "mount -t tmpfs none /dev/shm && hostname probe")
    return f"containers are refused: {refused.stderr.strip()}" if refused.returncode else ""


class Hosts:
    """Hosts on this machine: with Hosts(4, rate="100mbit") as hosts: subprocess.run([*hosts.prefix(1), "ping", ...])

    Host i has the address hosts.address(i) on the device eth0. When the `with` ends, the processes that are left on the
    hosts are killed and the hosts are removed, also after an error, Ctrl-C, SIGTERM or SIGHUP. A signal then comes as
    KeyboardInterrupt. Only SIGKILL leaves the hosts; `ip -all netns delete` removes every namespace of the machine.

    Args:
        count: number of hosts, 1 to 250.
        rate: the most that each host sends, and receives, such as "100mbit"; None: no limit.
        delays: for far hosts, the seconds that every packet to or from the host takes, by the host's number.

    Raises:
        ConfigError: there is no root or no iproute2, an argument is wrong, or the kernel refuses. The message says what
            to do.
    """

    def __init__(
        self, count: int, *, rate: str | None = None, delays: Mapping[int, float] | None = None
    ) -> None:
        if not 1 <= count <= _MOST_HOSTS:
            raise ConfigError(f"Hosts: count must be 1 to {_MOST_HOSTS}, got {count}")
        if rate is not None:
            parse_rate(rate)
        for host, delay_s in (delays or {}).items():
            if host not in range(count) or not 0 < delay_s < 60:
                raise ConfigError(
                    f"Hosts: delays must give hosts 0 to {count - 1} seconds above 0 and below 60, got {delays}"
                )
        self.count: int = count
        self.delays: dict[int, float] = dict(delays or {})
        self.rate: str | None = rate
        self.name: str = f"gs{os.getpid()}x{next(_numbers)}"
        self.switch: str = f"{self.name}-switch"
        self._handlers: dict[int, Any] = {}
        self._cables: list[subprocess.Popen[str]] = []

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace, as `ip netns` shows it."""
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        """The IPv4 address of a host on the network between the hosts."""
        return f"10.213.0.{host + 1}"

    def prefix(self, host: int, *, container: bool = False) -> list[str]:
        """Returns the words before a command that make it run on the host, or in a container on the host's network."""
        inside = [*_CONTAINER, _OWN_FOLDERS, "sh"] if container else []
        return ["ip", "netns", "exec", self.namespace(host), *inside]

    def counters(self, host: int) -> Counters:
        """Returns the counters of the host's eth0."""

        def text(path: str) -> str:
            read = _run(*self.prefix(host), "cat", path)
            if read.returncode:
                raise FileNotFoundError(read.stderr.strip())
            return read.stdout

        return Counters.read(DEVICE, text)

    def __enter__(self) -> "Hosts":
        if os.geteuid() != 0:
            raise ConfigError(f"Hosts: {missing()}")
        self._catch_endings()
        try:
            self._ip("netns", "add", self.switch)
            self._ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", self.switch, "link", "set", "bridge", "up")
            for host in range(self.count):
                self._add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: int) -> None:
        own, port = self.namespace(host), f"port{host}"
        self._ip("netns", "add", own)
        if host in self.delays:
            self._start_far_cable(host, port)
        else:
            ends = ("add", DEVICE, "type", "veth", "peer", "name", port, "netns", self.switch)
            self._ip("-n", own, "link", *ends)
        self._ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
        self._ip("-n", own, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
        if self.rate is not None:
            shape = Shape(self.rate)
            for space, device in ((own, DEVICE), (self.switch, port)):
                self._ip("-n", space, *shape.packets(device))
                self._command("tc", "-n", space, *shape.qdisc(device))
        self._ip("-n", own, "link", "set", DEVICE, "up")
        self._ip("-n", own, "link", "set", "lo", "up")
        # Linux's own default, whatever this machine has: figures depend on it.
        route = ("10.213.0.0/24", "dev", DEVICE, "src", self.address(host), "congctl", "cubic")
        self._ip("-n", own, "route", "replace", *route)

    def _start_far_cable(self, host: int, port: str) -> None:
        """Starts a program that carries packets between the bridge's port and the host's device, after a delay."""
        far, program = f"far{host}", Path(__file__).with_name("distance.py")
        command = [
            "ip",
            "netns",
            "exec",
            self.switch,
            sys.executable,
            str(program),
            str(self.delays[host]),
            port,
            far,
        ]
        cable = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._cables.append(cable)
        assert cable.stdout is not None
        assert cable.stderr is not None
        if cable.stdout.readline() != "ready\n":
            raise ConfigError(
                f"Hosts: delays need a kernel with /dev/net/tun (TAP): {cable.stderr.read().strip()}"
            )
        self._ip("-n", self.switch, "link", "set", far, "netns", self.namespace(host))
        self._ip("-n", self.namespace(host), "link", "set", far, "name", DEVICE)

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C would leave some hosts.
        with signals.held_back(signal.SIGINT, *_ENDINGS):
            for name in [self.switch, *(self.namespace(host) for host in range(self.count))]:
                with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
                    _end_processes(name)
                    _run("ip", "netns", "delete", name)  # which takes its devices along
            for cable in self._cables:  # ended above
                cable.communicate()
            self._cables = []
        for ending, handler in self._handlers.items():
            signal.signal(ending, handler)
        self._handlers = {}

    def _catch_endings(self) -> None:
        """Makes signals that would end this process run __exit__ first. Handlers that are set already stay."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for ending in _ENDINGS:
            if signal.getsignal(ending) is signal.SIG_DFL:
                self._handlers[ending] = signal.signal(ending, _interrupt)

    def _ip(self, *arguments: str) -> None:
        self._command("ip", *arguments)

    @staticmethod
    def _command(*command: str) -> None:
        try:
            done = _run(*command)
        except FileNotFoundError:
            raise ConfigError(f"Hosts: network namespaces need {command[0]}; install iproute2") from None
        if done.returncode:
            why = done.stderr.strip() or f"exit code {done.returncode}"
            raise ConfigError(
                f"Hosts: `{' '.join(command)}` failed: {why}; it needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN "
                "(in Docker: --privileged) and a kernel with veth, bridge and sch_tbf"
            )


def _end_processes(namespace: str) -> None:
    """Kills a namespace's processes. Returns when they are gone, or after some seconds if one cannot be killed yet."""
    deadline = time.monotonic() + _PATIENCE_S
    while left := _run("ip", "netns", "pids", namespace).stdout.split():
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
