# torch's agent logs each failure and each signal that it sends. `gossamer run` says the same once, at the end and in
# words that name the cause, so these lines of torch's are left out. Messages that are not known here pass. run.py and
# elastic/process.py call it.
"""What torch's agent logs about workers that fail."""

import logging
import os
import sys

from gossamer.launch.outcome import how_it_ended

SWITCHES = ("LOGLEVEL", "TORCH_LOGS")  # torch's own: who sets one wants to see torch's lines
FAILED = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
TOLD_BY_US = {
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
    """Leaves out torch's lines that `gossamer run` says in its own words, unless LOGLEVEL or TORCH_LOGS is set.

    Args:
        restarts: how often torch's agent starts all workers again after a failure; each time is said.
    """
    for name, templates in TOLD_BY_US.items():
        log = logging.getLogger(name)
        for earlier in [each for each in log.filters if isinstance(each, _Quiet)]:
            log.removeFilter(earlier)
        if not any(switch in os.environ for switch in SWITCHES):
            log.addFilter(_Quiet(templates, restarts))
