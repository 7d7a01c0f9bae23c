# Leaves out lines of torch's agent about failures and signals, because `gossamer run` says the same once, at the end,
# and names the cause. Messages of torch that are not listed here pass. The lines also tell which workers the agent has
# ended itself, which nothing else of torch does. here.py and elastic/process.py call it.
"""What torch's agent logs about workers that fail."""

import logging
import os
import sys
from collections.abc import Callable

from gossamer.launch.outcome import how_it_ended

SWITCHES = ("LOGLEVEL", "TORCH_LOGS")  # torch's own switches: with either set, all of torch's lines are shown
FAILED = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
CLOSING = ("Sending process %s closing signal %s", "Closing process %s via signal %s")
PROCESSES = "torch.distributed.elastic.multiprocessing.api"
TOLD_BY_US: dict[str, tuple[str, ...]] = {
    PROCESSES: (FAILED, *CLOSING),
    "torch.distributed.elastic.agent.server.api": (
        "Received %s death signal, shutting down workers",
        "Got termination signal: %s",
    ),
}


class _Quiet(logging.Filter):
    def __init__(self, templates: tuple[str, ...], restarts: int, level: int) -> None:
        super().__init__()
        self._templates, self._restarts, self._failures = templates, restarts, 0
        self.level: int = level  # below it nothing passes
        self.closed: set[int] = set()  # processes that the agent has ended

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg in CLOSING and isinstance(record.args, tuple):
            self.closed.add(int(str(record.args[0])))
        if record.msg == FAILED and isinstance(record.args, tuple):
            self._failures += 1
            if self._failures <= self._restarts:
                exit_code, local_rank = (int(str(each)) for each in record.args[:2])
                print(
                    f"gossamer run: local rank {local_rank} {how_it_ended(exit_code)}; all workers start again "
                    f"({self._failures} of {self._restarts} times)",
                    file=sys.stderr,
                )
        return record.levelno >= self.level and record.msg not in self._templates


def quieten_torch(*, restarts: int = 0) -> Callable[[int], bool]:
    """Leaves out those lines of torch that `gossamer run` replaces, unless LOGLEVEL or TORCH_LOGS is set.

    Args:
        restarts: how often torch's agent starts all workers again after a failure. Each time a line says so.

    Returns a function that says whether the agent has ended the worker with a process id. If logging is disabled in
    this process, nothing is known, and it says so of every worker.
    """
    shown = any(switch in os.environ for switch in SWITCHES)
    filters = {}
    for name, templates in TOLD_BY_US.items():
        log = logging.getLogger(name)
        level = log.getEffectiveLevel()
        for earlier in [each for each in log.filters if isinstance(each, _Quiet)]:
            log.removeFilter(earlier)
            level = earlier.level
        filters[name] = _Quiet(() if shown else templates, 0 if shown else restarts, level)
        log.addFilter(filters[name])
        log.setLevel(min(level, logging.WARNING))  # the filter must see its lines
    known = logging.getLogger(PROCESSES).isEnabledFor(logging.WARNING)
    closed = filters[PROCESSES].closed
    return lambda process: process in closed or not known
