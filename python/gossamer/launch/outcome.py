# How a run of workers has ended: which worker failed, when and why, and what `gossamer run` prints about it. here.py
# and elastic/ make an outcome from torch's error, where the workers are. It is sent over ssh, and printed where the
# user is.
"""The outcome of a run."""

import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

NOTICE_S = 5  # a killed worker may be noticed this much later than the errors that it causes


@dataclass(frozen=True)
class Failure:
    """One worker that failed."""

    rank: int
    exit_code: int  # below 0: the signal that killed it
    at_ns: float
    trace: str  # the traceback of its exception; empty if it left none
    told: bool  # whether the worker has reported itself why it ended


@dataclass
class Outcome:
    """The failures of a run, and the signal that stopped it. Without either, every worker ended well."""

    failures: list[Failure] = field(default_factory=list)
    stopped_by: int = 0  # the signal that ended the run

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Outcome":
        return Outcome([Failure(**failure) for failure in values["failures"]], values["stopped_by"])


def failure_of(rank: int, failure: ProcessFailure, *, ended_by_agent: bool) -> Failure:
    """Returns what torch reports of one worker that failed.

    Args:
        ended_by_agent: whether the worker ran until the agent ended it, because another one had failed.
    """
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    extra = extra if isinstance(extra, dict) else {}
    if "time_ns" in extra:  # torch's own times are whole seconds, which cannot order failures
        at_ns: float = int(extra["time_ns"])
    elif ended_by_agent and failure.exitcode == -signal.SIGTERM:
        at_ns = math.inf  # never the cause
    else:
        # The worker left no report. Its peers may have reported the lost connection before the agent noticed its end.
        at_ns = (failure.timestamp - NOTICE_S) * 1e9
    trace = str(extra.get("py_callstack") or "").rstrip()
    return Failure(rank, failure.exitcode, at_ns, trace, bool(extra))


def report(outcome: Outcome) -> int:
    """Prints the first failure on stderr, its traceback last, and returns the exit code of `gossamer run`."""
    if outcome.failures:
        print(f"gossamer run: {describe(outcome.failures)}", file=sys.stderr)
        first = first_failure(outcome.failures)
        if first.trace:
            print(first.trace, file=sys.stderr)
        return _exit_code(first)
    if outcome.stopped_by:
        name = signal.Signals(outcome.stopped_by).name
        print(f"gossamer run: stopped by {name}; all workers ended", file=sys.stderr)
        return 128 + outcome.stopped_by
    return 0


def first_failure(failures: Sequence[Failure]) -> Failure:
    return min(failures, key=lambda failure: failure.at_ns)


def describe(failures: Sequence[Failure]) -> str:
    """Says which worker failed first and how, and which workers ended because of it."""
    first = first_failure(failures)
    others = ", ".join(str(rank) for rank in sorted(other.rank for other in failures) if rank != first.rank)
    what = how_it_ended(first.exit_code if _was_killed(first) else _exit_code(first))
    also = f" (then rank {others} ended too)" if others else ""
    return f"rank {first.rank} {what}{also}"


def how_it_ended(exit_code: int) -> str:
    """Says an exit code in words. Below 0 it is the signal that killed the worker."""
    if exit_code >= 0:
        return f"failed with exit code {exit_code}"
    names = {each.value: each.name for each in signal.Signals}
    name = names.get(-exit_code, f"signal {-exit_code}")
    return f"was killed by signal {-exit_code} ({name})"


def _was_killed(failure: Failure) -> bool:
    # An exception is reported as such even if the agent's own SIGTERM came before the exit.
    return failure.exit_code < 0 and not failure.told


def _exit_code(failure: Failure) -> int:
    if _was_killed(failure):
        return 128 - failure.exit_code
    return failure.exit_code if failure.exit_code > 0 else 1
