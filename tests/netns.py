"""Several hosts on one machine: network namespaces around one bridge. Needs root and iproute2; see `missing()`.

with Hosts(2) as hosts: subprocess.Popen([*hosts.prefix(1), "python", ...]) runs on host 1, which has the address
hosts.address(1) on the device eth0. The bridge lives in a namespace of its own, so nothing is changed outside.
"""

import contextlib
import itertools
import os
import shutil
import subprocess

DEVICE = "eth0"
# A container of a rank: its own IPC, mounts (so /dev/shm and /tmp), process ids and host name.
CONTAINER = ("unshare", "--ipc", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c")
# The shell stays, as process 1 of the container: that one cannot kill itself.
OWN_FOLDERS = 'mount -t tmpfs none /dev/shm && hostname "host-$RANK" && "$@"; exit $?'

_numbers = itertools.count()


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def missing() -> str:
    """Why there can be no hosts here; empty where they can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    try:
        with Hosts(1):
            return ""
    except RuntimeError as error:
        return f"network namespaces are refused: {error}"


def no_containers() -> str:
    refused = run(*CONTAINER, "mount -t tmpfs none /dev/shm && hostname probe")
    return f"containers are refused: {refused.stderr.strip()}" if refused.returncode else ""


class Hosts:
    def __init__(self, count: int) -> None:
        self.count = count
        self.name = f"gs{os.getpid()}x{next(_numbers)}"
        self.switch = f"{self.name}-switch"

    def namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        return f"10.213.0.{host + 1}"

    def prefix(self, host: int, *, container: bool = False) -> list[str]:
        """What goes before a command so that it runs on the host, or in a container of that host's network."""
        inside = [*CONTAINER, OWN_FOLDERS, "sh"] if container else []
        return ["ip", "netns", "exec", self.namespace(host), *inside]

    def __enter__(self) -> "Hosts":
        try:
            self._ip("netns", "add", self.switch)
            self._ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", self.switch, "link", "set", "bridge", "up")
            for host in range(self.count):
                own, port = self.namespace(host), f"port{host}"
                self._ip("netns", "add", own)
                ends = ("add", DEVICE, "type", "veth", "peer", "name", port, "netns", self.switch)
                self._ip("-n", own, "link", *ends)
                self._ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
                self._ip("-n", own, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
                self._ip("-n", own, "link", "set", DEVICE, "up")
                self._ip("-n", own, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [self.switch, *(self.namespace(host) for host in range(self.count))]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run("ip", "netns", "delete", name)  # which takes its devices along

    @staticmethod
    def _ip(*arguments: str) -> None:
        done = run("ip", *arguments)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
