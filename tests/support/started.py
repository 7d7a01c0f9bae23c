"""Commands that a test starts with some python: the real one, or quick_python.py's."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import ROOT


class Started:
    """A running command; ``finish`` waits and returns (exit code, stdout, stderr)."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def finish(self, timeout_s: float = 400) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@contextmanager
def starting(python: str, folder: Path) -> Iterator[Callable[..., Started]]:
    """Gives ``start(argv, env={...}, prefix=[...])``, which runs ``prefix... python argv...`` in the folder.

    Processes that are left at the end are killed.
    """
    running: list[subprocess.Popen[str]] = []

    def begin(argv: Sequence[str], *, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()):
        process = subprocess.Popen(
            [*prefix, python, *argv],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return Started(process)

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()
