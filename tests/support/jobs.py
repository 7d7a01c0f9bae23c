"""Tests that run in the ranks of a job of real processes, each an item of pytest's own.

A fixture gives a ``Job``. A test that uses the fixture does not run in pytest's process: every rank calls the test's
function with the values of its other fixtures and parameters, which must be picklable. The test passes if the call
returns on every rank; otherwise it fails with the tracebacks of the ranks. A test that skips must skip on every rank.

The processes start at the first test and serve the tests that follow, because a start costs seconds. After a failure
the ranks may be out of step, so the job is killed, and the next test starts another one.

The processes are forks (forks.py).

tests/conftest.py calls ``run_in_ranks`` for every test; rank_process.py is what a process runs.
"""

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.forks import kind_of, rank_environment
from tests.support.rank_process import SKIPPED, serve

START_LIMIT_S = 150  # below pytest's own limit, which would end pytest itself


class Rank:
    """A process of a job, what it printed, and the connection that tells it what to call."""

    def __init__(self, rank: int, environment: Mapping[str, str], folder: Path) -> None:
        self.rank = rank
        self.output = folder / f"rank{rank}.txt"
        self.output.touch()
        self.connection, theirs = Pipe()
        self.process = kind_of(rank)(target=serve, args=(theirs, environment, self.output))
        self.process.start()
        theirs.close()
        self.said = 0  # bytes of output before the present call

    def ask(self, call: bytes) -> None:
        self.said = self.output.stat().st_size
        with suppress(OSError):  # the process has ended, which answer() finds
            self.connection.send_bytes(call)

    def answer(self) -> str:
        """What became of the call: "" or a traceback."""
        try:
            return str(self.connection.recv())
        except (EOFError, OSError):
            self.process.join(10)
            return f"the process ended with exit code {self.process.exitcode}\n"

    def stack(self) -> str:
        """Of a process that does not answer."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "did not return; its stack is the last of its output\n"

    def printed(self) -> str:
        with self.output.open("rb") as output:
            output.seek(self.said)
            return output.read()[-8000:].decode(errors="replace")


class Job:
    """``size`` processes on this host, in the environment that torchrun would give them.

    Args:
        environment: variables for all ranks, beside those of pytest's process.
        limit_s: for a test.
        grace_s: for the other ranks, once one has failed.
    """

    def __init__(
        self,
        size: int,
        environment: Mapping[str, str] | None = None,
        *,
        limit_s: float = 150,
        grace_s: float = 10,
    ) -> None:
        self.size, self.limit_s, self.grace_s = size, limit_s, grace_s
        self.environment = dict(environment or {})
        self._ranks: list[Rank] = []
        self._begun: list[tuple[Callable[..., object], dict[str, Any]]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="job")

    @contextmanager
    def within(
        self, begin: Callable[..., object], end: Callable[[], object], **arguments: Any
    ) -> Iterator[None]:
        """Every rank calls ``begin(**arguments)`` before the tests inside, and ``end()`` after them.

        A job that replaces a failed one begins in the same way.
        """
        self._begun.append((begin, arguments))
        try:
            if self._ranks:
                self._call(begin, arguments)
            yield
        finally:
            self._begun.pop()
        if self._ranks:
            self._call(end, {})

    def run(self, function: Callable[..., object], arguments: dict[str, Any]) -> None:
        """Every rank calls ``function(**arguments)``; functions are found by name, so they are a module's.

        Raises:
            pytest.fail.Exception: it failed on a rank, or a rank ended or did not return.
        """
        if not self._ranks:
            self._start()
        self._call(function, arguments, self.limit_s)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes, which must end by themselves and without an error."""
        try:
            for rank in self._ranks:
                rank.connection.close()
            for rank in self._ranks:
                rank.process.join(60)
            codes = [rank.process.exitcode for rank in self._ranks]
            assert codes == [0] * len(codes), (
                f"ranks ended with exit codes {codes}:\n" + self._ranks[0].printed()
            )
        finally:
            self.kill()
            self._folder.cleanup()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()
        self._ranks = []

    def _start(self) -> None:
        # As torchrun does, a store outside the ranks that all of them, and all their groups, meet through.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._ranks = [
            Rank(
                rank,
                rank_environment(rank, self.size, self._store.port) | self.environment,
                Path(self._folder.name),
            )
            for rank in range(self.size)
        ]
        for begin, arguments in self._begun:
            self._call(begin, arguments)

    def _call(
        self, function: Callable[..., object], arguments: dict[str, Any], limit_s: float = START_LIMIT_S
    ) -> None:
        call = pickle.dumps((function, arguments))
        for rank in self._ranks:
            rank.ask(call)
        answers = self._answers(limit_s)
        failed = {rank: text for rank, text in answers.items() if text}
        if not failed:
            return
        if all(text.startswith(SKIPPED) for text in answers.values()):
            pytest.skip(answers[self._ranks[0]].removeprefix(SKIPPED))
        report = [
            f"rank {rank.rank} of {self.size}: {text}\n{rank.printed()}" for rank, text in failed.items()
        ]
        self.kill()
        pytest.fail("\n".join(report), pytrace=False)

    def _answers(self, limit_s: float) -> dict[Rank, str]:
        """Each rank's; once one has failed, the others have `grace_s` left."""
        answers: dict[Rank, str] = {}
        asked: dict[Connection, Rank] = {rank.connection: rank for rank in self._ranks}
        until = time.monotonic() + limit_s
        while asked:
            ready = wait(list(asked), max(until - time.monotonic(), 0))
            for connection in ready:
                rank = asked.pop(connection)
                answers[rank] = rank.answer()
                if answers[rank] and not answers[rank].startswith(SKIPPED):
                    until = min(until, time.monotonic() + self.grace_s)
            if not ready:
                break
        return answers | {rank: rank.stack() for rank in asked.values()}


def run_in_ranks(item: pytest.Function) -> bool:
    """Runs a test that uses a Job in the ranks of that; False if it uses none."""
    jobs = [value for value in item.funcargs.values() if isinstance(value, Job)]
    if not jobs:
        return False
    names = item._fixtureinfo.argnames
    arguments = {name: item.funcargs[name] for name in names if item.funcargs[name] not in jobs}
    jobs[0].run(item.function, arguments)
    return True
