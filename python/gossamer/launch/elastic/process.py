# One worker of an elastic run as a process on this host: started and watched by torch's elastic multiprocessing, which
# also puts its number before its lines and reads its error file. Knows nothing of groups. Used by command.py for hosts
# that are this one, and by far.py on others.
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
    """What every worker runs.

    Args:
        command: with its arguments.
        env: variables beside those of the driver.
        log_dir: a folder for the output that torch tees or redirects.
        tee, redirects: as torchrun has them.
    """

    command: Sequence[str]
    log_dir: str
    env: Mapping[str, str] = field(default_factory=dict)
    tee: str = "3"
    redirects: str = "0"


class Worker(Protocol):
    """A running worker. `number` is its own for the whole run, as is its slot; its rank changes."""

    number: int
    slot: Slot

    def ended(self) -> bool | Failure:
        """False while it runs, True after a success, the failure otherwise. Once it has ended, ask no more."""

    def end(self) -> None:
        """Asks it to end."""

    def kill(self) -> None:
        """Ends it at once."""


class LocalWorker:
    """A worker on this host."""

    def __init__(self, program: Program, number: int, slot: Slot, *, env: Mapping[str, str]) -> None:
        self.number, self.slot = number, slot
        quieten_torch()
        own = {
            **program.env,
            **env,
            "TORCHELASTIC_RUN_ID": f"worker{number}",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self._context: PContext = start_processes(
            name="worker",
            entrypoint=program.command[0],
            args={0: tuple(program.command[1:])},
            envs={0: own},
            logs_specs=DefaultLogsSpecs(
                log_dir=program.log_dir,
                redirects=Std.from_str(program.redirects),
                tee=Std.from_str(program.tee),
            ),
            log_line_prefixes={0: f"[{number}] "},
        )
        self.pid = self._context.pids()[0]

    def ended(self) -> bool | Failure:
        result = self._context.wait(timeout=0)
        if result is None:
            return False
        return failure_of(self.number, result.failures[0]) if result.is_failed() else True

    def end(self) -> None:
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Sends it to the process and its children."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # ended in this moment

    def kill(self) -> None:
        self._context.close(signal.SIGKILL)
