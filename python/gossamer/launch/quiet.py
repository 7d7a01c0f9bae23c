# Leaves out lines of torch's agent about failures and signals, because `gossamer run` says the same once, at the end,
# and names the cause. Messages of torch that are not listed here pass. here.py and elastic/process.py call it.
"""What torch's agent logs about workers that fail."""

import logging
import os
import sys

from gossamer.launch.outcome import how_it_ended

SWITCHES = ("LOGLEVEL", "TORCH_LOGS")  # torch's own switches: with either set, all of torch's lines are shown
FAILED = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
TOLD_BY_US: dict[str, tuple[str, ...]] = {
    "torch.distributed.elastic.multiprocessing.api": (
        FAILED,
        "Sending process %s closing signal %s",
        "Closing process %s via signal %s",
    ),
    "torch.distributed.elastic.agent.server.api": (
        "Received %s death signal, shutting down workers",
        "Got termination signal: %s",
    ),
}


class _Quiet(logging.Filter):
    def __init__(self, templates: tuple[str, ...], restarts: int) -> None:
        super().__init__()
        self._templates, self._restarts, self._failures = templates, restarts, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == FAILED and isinstance(record.args, tuple):
            self._failures += 1
            if self._failures <= self._restarts:
                exit_code, local_rank = (int(str(each)) for each in record.args[:2])
                print(
                    f"gossamer run: local rank {local_rank} {how_it_ended(exit_code)}; all workers start again "
                    f"({self._failures} of {self._restarts} times)",
                    file=sys.stderr,
                )
        return record.msg not in self._templates


def quieten_torch(*, restarts: int = 0) -> None:
    """Leaves out those lines of torch that `gossamer run` replaces, unless LOGLEVEL or TORCH_LOGS is set.

    Args:
        restarts: how often torch's agent starts all workers again after a failure. Each time a line says so.
    """
    for name, templates in TOLD_BY_US.items():
        log = logging.getLogger(name)
        for earlier in [each for each in log.filters if isinstance(each, _Quiet)]:
            log.removeFilter(earlier)
        if not any(switch in os.environ for switch in SWITCHES):
            log.addFilter(_Quiet(templates, restarts))
