# One worker of an elastic run, as a process on this host. torch's elastic multiprocessing starts and watches it, puts
# its number before its lines and reads its error file. It knows nothing of groups. Used by command.py for this host,
# and by far.py on other hosts.
"""A worker's process."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes

from gossamer.launch.elastic.slots import Slot
from gossamer.launch.outcome import Failure, failure_of
from gossamer.launch.quiet import quieten_torch


@dataclass(frozen=True)
class Program:
    """The program that every worker runs.

    Args:
        command: the command with its arguments.
        env: variables besides those of the driver.
        log_dir: a folder for the output that torch tees or redirects.
        tee, redirects: as in torchrun.
    """

    command: Sequence[str]
    log_dir: str
    env: Mapping[str, str] = field(default_factory=dict)
    tee: str = "3"
    redirects: str = "0"


class Worker(Protocol):
    """A running worker. It keeps its number and its slot for the whole run, while its rank changes."""

    number: int
    slot: Slot

    def ended(self) -> bool | Failure:
        """Returns False while it runs, True after a success, the failure otherwise. Do not call it after that."""

    def end(self) -> None:
        """Asks the worker to end."""

    def kill(self) -> None:
        """Ends the worker at once. Nothing else is called after it."""

    def give_up(self) -> None:
        """Kills a worker that does not do what it is told. ended() says soon that it was lost."""


class LocalWorker:
    """A worker on this host."""

    def __init__(self, program: Program, number: int, slot: Slot, *, env: Mapping[str, str]) -> None:
        self.number: int = number
        self.slot = slot
        quieten_torch()
        own = {"TORCHELASTIC_RUN_ID": f"worker{number}", "TORCHELASTIC_RESTART_COUNT": "0"}
        redirects, tee = Std.from_str(program.redirects), Std.from_str(program.tee)
        self._context: PContext = start_processes(
            name="worker",
            entrypoint=program.command[0],
            args={0: tuple(program.command[1:])},
            envs={0: {**program.env, **env, **own}},
            logs_specs=DefaultLogsSpecs(log_dir=program.log_dir, redirects=redirects, tee=tee),
            log_line_prefixes={0: f"[{number}] "},
        )
        self.pid: int = self._context.pids()[0]
        self._outcome: bool | Failure = False
        self._told_to_end = False

    def ended(self) -> bool | Failure:
        if self._outcome is False and (result := self._context.wait(timeout=0)) is not None:
            told = self._told_to_end
            failed = result.is_failed()
            self._outcome = not failed or failure_of(self.number, result.failures[0], ended_by_agent=told)
        return self._outcome

    def end(self) -> None:
        self._told_to_end = self.ended() is False
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # it has just ended

    def give_up(self) -> None:
        self.signal(signal.SIGKILL)

    def kill(self) -> None:
        self._context.close(signal.SIGKILL)
