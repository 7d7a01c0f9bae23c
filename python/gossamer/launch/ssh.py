# Starts the agent of a host, over the system's ssh or without it on this machine, and talks to it. Everything that
# varies goes through the agent's standard input as JSON, so nothing is quoted for a shell or shown in a list of
# processes. The end of that input, for whatever reason, ends the host. Used by fleet.py and elastic/remote.py;
# agent.py is the other end.
"""Starting and steering the agent of a host."""

import base64
import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

import torch

from gossamer import __version__
from gossamer.errors import ConfigError
from gossamer.launch.hosts import Host

# Variables that other hosts get, besides those of -x.
PREFIXES = ("HOROVOD_", "GOSSAMER_", "BAGUA_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "PYTHON")
NAMES = ("LD_LIBRARY_PATH", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "PYTHON_EXEC")
MARK = "\x1e"  # begins a line of the agent itself, among the output of its workers
START_TIMEOUT_S = 30
ALIVE_S = 5  # a host that is silent for six times this long is lost
# The environment must be set before Python starts. So this Python reads it, then replaces itself by another.
AGENT = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from gossamer.launch.agent import main; main()"
BOOTSTRAP = (
    "import json, os, sys; job = json.loads(open(0, 'rb', 0, closefd=False).readline()); "
    "os.environ.update(job['environment']); os.chdir(job['directory']); "
    "os.execv(sys.executable, [sys.executable, '-u', '-c', job['agent']])"
)


class AgentEvent(NamedTuple):
    """An event of a host's agent: "ready" or "ended" with its message, or "exit" with its exit code."""

    kind: str
    host: int
    said: Any


def versions() -> dict[str, str]:
    """Returns the versions that all hosts of a run must have alike."""
    return {"gossamer": __version__, "torch": torch.__version__}


def check_versions(host: str, there: dict[str, str]) -> None:
    """Raises ConfigError if a host has other versions than this one."""
    if there != versions():
        raise ConfigError(f"host {host}: must have the same versions as here, {versions()}, got {there}")


def start_timeout() -> int:
    """Returns the seconds in which a host must be ready; --start-timeout has put them into the environment.

    Raises:
        ConfigError: not a whole number from 1.
    """
    text = os.environ.get("HOROVOD_START_TIMEOUT", str(START_TIMEOUT_S))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"--start-timeout and HOROVOD_START_TIMEOUT must be at least 1 second, got {text!r}"
        )
    return int(text)


def ssh_options(*, port: int | None, identity: str | None, timeout_s: int) -> list[str]:
    """Returns options with which ssh never asks for a password, and notices a host that is gone."""
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": timeout_s,
        "ServerAliveInterval": ALIVE_S,
        "ServerAliveCountMax": 6,
    }
    options = ["-T", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    options += ["-p", str(port)] if port is not None else []
    return options + (["-i", identity] if identity is not None else [])


def environment(exported: Sequence[str]) -> dict[str, str]:
    """Returns the variables of this process that an agent gets; ``exported`` are the entries of -x."""
    names = {entry.partition("=")[0] for entry in exported} | set(NAMES)
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(PREFIXES)}


def pack(folder: str | None, pattern: str) -> dict[str, str]:
    """Returns the files of a folder as text that JSON can hold."""
    paths = Path(folder).glob(pattern) if folder is not None else []
    return {path.name: base64.b64encode(path.read_bytes()).decode() for path in paths}


def unpack(files: Mapping[str, str], folder: str) -> None:
    for name, content in files.items():
        (Path(folder) / Path(name).name).write_bytes(base64.b64decode(content))


class Agent:
    """A running agent. Its events are put into ``events``; its workers' output goes to stdout and stderr."""

    def __init__(
        self,
        host: Host,
        index: int,
        *,
        options: Sequence[str],
        events: "queue.Queue[AgentEvent]",
    ) -> None:
        self.host, self.index, self.last_words = host, index, ""
        self.command = [sys.executable, "-c", BOOTSTRAP]
        if not host.is_local():
            self.command = ["ssh", *options, host.name, shlex.join(self.command)]
        self._events, self._ready = events, False
        pipe = subprocess.PIPE
        # A session of its own, so that Ctrl-C reaches only this process, which then ends the agent.
        self.process = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        readers = [threading.Thread(target=self._read, args=(self.process.stdout, sys.stdout), daemon=True)]
        readers.append(
            threading.Thread(target=self._read, args=(self.process.stderr, sys.stderr), daemon=True)
        )
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(readers,), daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends one line of JSON. If the agent is gone already, its event says so."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Closes the agent's input, which makes it end its workers and itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _read(self, source: IO[bytes], sink: TextIO) -> None:
        for raw in source:
            line = raw.decode(errors="replace")
            output, mark, said = line.partition(MARK)
            if output.strip():
                self.last_words = output.strip()
                try:
                    sink.write(output if self._ready else f"{self.host.name}: {output}")
                    sink.flush()
                except OSError:  # nobody reads what the workers print
                    self._events.put(AgentEvent("broken", self.index, None))
            if mark:
                message = json.loads(said)
                self._ready = True
                self._events.put(AgentEvent(message.pop("kind"), self.index, message))

    def _wait(self, readers: Sequence[threading.Thread]) -> None:
        code = self.process.wait()
        for reader in readers:
            reader.join(5)  # a grandchild may hold the pipe
        self._events.put(AgentEvent("exit", self.index, code))
