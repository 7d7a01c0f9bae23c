# Starts the agent of a host, over the system's ssh or without it on this machine, and talks to it. Everything that
# varies goes through the agent's standard input as JSON, so nothing is quoted for a shell or shown in a list of
# processes. The end of that input, for whatever reason, ends the host. Used by fleet.py and elastic/remote.py;
# agent.py is the other end.
"""Starting and steering the agent of a host."""

import argparse
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
AGENT = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from gossamer.launch.{} import main; main()"
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


def ssh_options(args: argparse.Namespace) -> list[str]:
    """Returns options with which ssh never asks for a password, and notices a host that is gone."""
    limits = [f"ConnectTimeout={start_timeout()}", f"ServerAliveInterval={ALIVE_S}", "ServerAliveCountMax=6"]
    options = ["-T", *(word for setting in ("BatchMode=yes", *limits) for word in ("-o", setting))]
    options += ["-p", str(args.remote_port)] if args.remote_port is not None else []
    return options + (["-i", args.identity_file] if args.identity_file is not None else [])


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Returns the variables of this process that an agent gets."""
    names = {entry.partition("=")[0] for entry in args.exported} | set(NAMES)
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(PREFIXES)}


def pack(folder: str | None, pattern: str) -> dict[str, str]:
    """Returns the files of a folder as text that JSON can hold."""
    paths = Path(folder).glob(pattern) if folder is not None else []
    return {path.name: base64.b64encode(path.read_bytes()).decode() for path in paths}


def unpack(files: Mapping[str, str], folder: str) -> None:
    for name, content in files.items():
        (Path(folder) / Path(name).name).write_bytes(base64.b64decode(content))


class Agent:
    """A running agent. Its events are put into ``events``; its workers' output goes to stdout and stderr.

    Args:
        index: the number of the host in the events.
        module: the module of gossamer.launch whose main() runs there, with these variables.
        args: the flags of `gossamer run`.
    """

    def __init__(
        self,
        host: Host,
        index: int,
        module: str,
        variables: Mapping[str, str],
        *,
        args: argparse.Namespace,
        events: "queue.Queue[AgentEvent]",
    ) -> None:
        self.host: Host = host
        self._index, self._events, self._ready, self._last_words = index, events, False, ""
        command = [sys.executable, "-c", BOOTSTRAP]
        self.reached_by: list[str] = [] if host.is_local() else ["ssh", *ssh_options(args), host.name]
        if self.reached_by:
            command = [*self.reached_by, shlex.join(command)]
        self._program, pipe = command[0], subprocess.PIPE
        # A session of its own, so that Ctrl-C reaches only this process, which then ends the agent.
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        pairs = (self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)
        readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for thread in (*readers, threading.Thread(target=self._wait, args=(readers,), daemon=True)):
            thread.start()
        self.send({"environment": dict(variables), "directory": os.getcwd(), "agent": AGENT.format(module)})

    def send(self, message: dict[str, Any]) -> None:
        """Sends one line of JSON. If the agent is gone already, its event says so."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def ended_with(self, code: int, when: str = "") -> str:
        """Says how the agent has ended, in words."""
        return f"{self._program} ended with code {code}{when}: {self._last_words or 'it said nothing'}"

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
                self._last_words = output.strip()
                try:
                    sink.write(output if self._ready else f"{self.host.name}: {output}")
                except OSError:  # nobody reads what the workers print
                    self._events.put(AgentEvent("broken", self._index, None))
            if mark:
                message = json.loads(said)
                self._ready = True
                self._events.put(AgentEvent(message.pop("kind"), self._index, message))

    def _wait(self, readers: Sequence[threading.Thread]) -> None:
        code = self.process.wait()
        for reader in readers:
            reader.join(5)  # a grandchild may hold the pipe
        self._events.put(AgentEvent("exit", self._index, code))
