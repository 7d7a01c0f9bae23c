# Hosts as network namespaces: each has eth0, a cable (veth) to a port of one bridge, which lies in a namespace of its
# own, so that nothing is changed outside. Everything is removed however the `with` ends. It starts no program: job.py
# does, and tests do through prefix(). How slow a cable is, is in shaping.py.
"""Network namespaces around a bridge, as hosts."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from gossamer.errors import ConfigError
from gossamer.netlab.counters import Counters
from gossamer.netlab.shaping import Shape
from gossamer.units import parse_rate

DEVICE = "eth0"
"""The name of a host's only network device."""
# A container of a rank: its own IPC, mounts (so /dev/shm and /tmp), process ids and host name.
_CONTAINER = ("unshare", "--ipc", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c")
# The shell stays, as process 1 of the container: that one cannot kill itself.
_OWN_FOLDERS = 'mount -t tmpfs none /dev/shm && hostname "host-$RANK" && "$@"; exit $?'
_MOST_HOSTS = 250  # addresses of one network
_PATIENCE_S = 5.0
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)

_numbers = itertools.count()


def missing() -> str:
    """Why there can be no hosts here, and what to do; empty where they can be made."""
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
    """Why ranks cannot be in containers of their own on a host; empty where they can."""
    refused = _run(*_CONTAINER, "mount -t tmpfs none /dev/shm && hostname probe")
    return f"containers are refused: {refused.stderr.strip()}" if refused.returncode else ""


class Hosts:
    """with Hosts(4, rate="100mbit") as hosts: subprocess.Popen([*hosts.prefix(1), "python", ...]) runs on host 1.

    Host i has the address hosts.address(i) on the device eth0. When the `with` ends, by an error, Ctrl-C, SIGTERM or
    SIGHUP too, processes that are left on the hosts are killed and the hosts removed; a signal then comes as
    KeyboardInterrupt. The SIGKILL of this process leaves them: `ip -all netns delete` removes every namespace there is.

    Args:
        count: of hosts, 1 to 250.
        rate: what each sends at most, and receives at most, such as "100mbit"; None: as fast as this machine is.

    Raises:
        ConfigError: no root, no iproute2, a bad argument, or the kernel refuses; the message says what to do.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        if not 1 <= count <= _MOST_HOSTS:
            raise ConfigError(f"Hosts: count must be 1 to {_MOST_HOSTS}, got {count}")
        if rate is not None:
            parse_rate(rate)
        self.count, self.rate = count, rate
        self.name = f"gs{os.getpid()}x{next(_numbers)}"
        self.switch = f"{self.name}-switch"
        self._handlers: dict[int, Any] = {}

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace, as `ip netns` shows it."""
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        """The IPv4 address of a host on the network between the hosts."""
        return f"10.213.0.{host + 1}"

    def prefix(self, host: int, *, container: bool = False) -> list[str]:
        """What goes before a command so that it runs on the host, or in a container of that host's network."""
        inside = [*_CONTAINER, _OWN_FOLDERS, "sh"] if container else []
        return ["ip", "netns", "exec", self.namespace(host), *inside]

    def counters(self, host: int) -> Counters:
        """Of the host's eth0."""

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
        # Linux's own choice, whatever this machine's is: with another, figures would be of that one.
        route = ("10.213.0.0/24", "dev", DEVICE, "src", self.address(host), "congctl", "cubic")
        self._ip("-n", own, "route", "replace", *route)

    def __exit__(self, *_: object) -> None:
        with self._no_interrupts():
            for name in [self.switch, *(self.namespace(host) for host in range(self.count))]:
                with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
                    _end_processes(name)
                    _run("ip", "netns", "delete", name)  # which takes its devices along
        for ending, handler in self._handlers.items():
            signal.signal(ending, handler)
        self._handlers = {}

    def _catch_endings(self) -> None:
        """So that what ends this process quietly runs __exit__ first. Handlers that somebody has set stay."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python takes handlers from no other
        for ending in _ENDINGS:
            if signal.getsignal(ending) is signal.SIG_DFL:
                self._handlers[ending] = signal.signal(ending, _interrupt)

    @contextlib.contextmanager
    def _no_interrupts(self) -> Iterator[None]:
        """A second Ctrl-C would leave half of it; it counts when all is removed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        came: list[int] = []

        def catch(number: int, _frame: FrameType | None) -> None:
            came.append(number)

        before = {ending: signal.signal(ending, catch) for ending in (signal.SIGINT, *_ENDINGS)}
        try:
            yield
        finally:
            for ending, handler in before.items():
                signal.signal(ending, handler)
        if came:
            raise KeyboardInterrupt

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
    """Returns when they are gone, or after some seconds: one in an uninterruptible call ends when that does."""
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
