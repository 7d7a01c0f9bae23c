"""One command of `make gpu-check`: with a log and a limit of its own, and with none of its processes left afterwards.

gpu_steps.py lists the commands, and gpu_check.py runs them one after the other.
"""

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 3.0  # for processes that end by themselves after the command has ended
OTHERS_S = 15.0  # for compute processes of others to end, before a command that must be alone


@dataclass(frozen=True)
class Command:
    """A command, and the patterns in its output that show whether it worked.

    Args:
        limit_s: None: no limit.
        must_say, must_not_say: patterns of re, searched in the output.
        excused_by: a pattern: the machine cannot do this, which is no failure.
        alone: refuse to run beside other compute processes, because they would disturb its figures.
    """

    name: str
    argv: Sequence[str]
    limit_s: float | None = None
    must_say: str = ""
    must_not_say: str = "(?!)"
    excused_by: str = "(?!)"
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> str:
        """The name of its log file."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-") + ".log"


def run(command: Command, root: Path, *, left_s: float | None = None) -> tuple[str, str]:
    """Runs a command in `root`. Its output goes to a file in root/logs.

    Args:
        left_s: what is left of the limit of all commands together. None: there is none.

    Returns how it ended ("passed", "failed: ..." or "left out: ..."), and its output.
    """
    limits = [limit for limit in (command.limit_s, left_s) if limit is not None]
    limit_s = min(limits) if limits else None
    if limit_s is not None and limit_s < 1:
        return "failed: no time was left for it", ""
    log = root / "logs" / command.log
    log.parent.mkdir(exist_ok=True)
    if command.alone and (others := wait_for_others()):
        message = f"there is {'; '.join(others)}"
        log.write_text(message + "\n")
        return f"failed: it must be alone on the GPU, but {message}", message
    environment = os.environ | {"PYTHONPATH": str(root / "python")} | command.environment
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command.argv,
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            message = f"{error.filename} is not on this machine"
            output.write(message + "\n")
            return _excuse(command, message) or f"failed: {message}", message
        code: int | None = None
        grace_s = 0.0
        try:
            code = process.wait(limit_s)
            grace_s = GRACE_S
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when we are told to end
            survivors = end_descendants(grace_s)
    text = log.read_text(errors="replace")
    if survivors:
        return f"failed: processes that cannot be killed: {', '.join(survivors)}", text
    return _judged(command, text, code, limit_s), text


def _judged(command: Command, text: str, code: int | None, limit_s: float | None) -> str:
    if excuse := _excuse(command, text):
        return excuse
    if code is None:
        return f"failed: took more than {limit_s:.0f} s"
    if code != 0:
        return f"failed: exit code {code}"
    if not re.search(command.must_say, text):
        return f"failed: its output lacks {command.must_say!r}"
    if found := re.search(command.must_not_say, text):
        return f"failed: its output says {found[0]!r}"
    return "passed"


def _excuse(command: Command, text: str) -> str:
    lines = [line for line in text.splitlines() if re.search(command.excused_by, line)]
    return f"left out: {lines[0].strip()}" if lines else ""


def adopt_orphans() -> None:
    """Makes this process the parent of each descendant whose own parent has ended, so that all of them are found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float = 0.0, patience_s: float = 20.0) -> list[str]:
    """Kills the descendants of this process that do not end within `grace_s`.

    Returns those that are there after `patience_s` more: a process that waits in a driver cannot be killed.
    """
    kill_at = time.monotonic() + grace_s
    while processes := descendants():
        if time.monotonic() >= kill_at:
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() >= kill_at + patience_s:
                return [f"{pid} {name}" for pid, name in processes.items()]
        with suppress(ChildProcessError):  # reap
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    return []


def descendants() -> dict[int, str]:
    """Returns the names of all processes below this one by process ID, zombies included."""
    names: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text()
        except OSError:  # it has ended
            continue
        before, _, after = text.rpartition(")")
        pid, _, name = before.partition(" (")
        names[int(pid)] = name
        children.setdefault(int(after.split()[1]), []).append(int(pid))
    found: dict[int, str] = {}
    parents = [os.getpid()]
    while parents:
        for child in children.get(parents.pop(), []):
            found[child] = names[child]
            parents.append(child)
    return found


def wait_for_others() -> list[str]:
    """Returns the compute processes on the GPU that do not end within OTHERS_S, as nvidia-smi names them."""
    until = time.monotonic() + OTHERS_S
    while others := compute_processes():
        if time.monotonic() >= until:
            break
        time.sleep(0.5)
    return others


def compute_processes() -> list[str]:
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return [line.strip() for line in done.stdout.splitlines() if re.match(r"\s*\d+\s*,", line)]
