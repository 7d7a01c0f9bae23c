"""sshd inside network namespaces, so that several hosts of gossamer.netlab can be reached over ssh.

Needs openssh-server.

with netlab.Hosts(3) as hosts, Reachable(hosts, folder) as ssh: a command with ssh.env in its environment reaches
hosts.address(1) on the port PORT, with the key ssh.key.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

from gossamer import netlab

PORT = 2222
DAEMON = shutil.which("sshd") or "/usr/sbin/sshd"

SERVER = """
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/sshd.pid{address}
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
"""
# The user's own configuration is not used.
CLIENT = """
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking accept-new
LogLevel ERROR
"""


def missing() -> str:
    """Why there can be no hosts with ssh here; empty where they can be made."""
    if why := netlab.missing():
        return why
    if shutil.which("ssh") is None or not os.path.exists(DAEMON):
        return "ssh between hosts needs openssh-server and openssh-client"
    return ""


class Reachable:
    def __init__(self, hosts: netlab.Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.key = str(folder / "key")
        self.env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> "Reachable":
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("key", "host_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            made = subprocess.run(make, capture_output=True, text=True, check=False)
            assert made.returncode == 0, made.stderr
        (self.folder / "client").write_text(CLIENT.format(folder=self.folder))
        program = self.folder / "bin" / "ssh"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder / "client"} "$@"\n')
        program.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # without it sshd does not start
        for host in range(self.hosts.count):
            settings = self.folder / f"server{host}"
            values = {"address": self.hosts.address(host), "port": PORT, "folder": self.folder}
            settings.write_text(SERVER.format(**values))
            command = [*self.hosts.prefix(host), DAEMON, "-D", "-e", "-f", str(settings)]
            self._daemons.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for host, daemon in enumerate(self._daemons):
            self._await(host, daemon)
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
            assert daemon.stderr is not None
            daemon.stderr.close()  # a connection that was cut off has it too, and lives on until its host ends

    def _await(self, host: int, daemon: subprocess.Popen) -> None:
        assert daemon.stderr is not None
        deadline = time.monotonic() + 20
        for line in daemon.stderr:  # "Server listening on ..."
            if "listening" in line:
                return
            assert time.monotonic() < deadline, f"sshd of host {host}: {line}"
        raise AssertionError(f"sshd of host {host} has ended")
