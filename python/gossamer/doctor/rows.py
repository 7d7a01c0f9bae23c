# What the checks of `gossamer doctor` take and return: the facts of every rank, the measurements between hosts, and
# rows of findings. checks.py runs the checks, cli.py prints the rows.
"""Facts, measurements and findings."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

OK, WARNING, ERROR = "ok", "warning", "error"

#: What one rank sees, by the names in facts.PROBES; JSON can hold it. A probe that failed left {"broken": text}.
Facts = Mapping[str, Any]


class BrokenFactError(Exception):
    """A probe of a rank failed. The message says which probe of which rank, and why."""


@dataclass(frozen=True)
class Row:
    """One finding. ``advice`` says what to do; it is empty if nothing is to be done."""

    check: str
    status: str
    finding: str
    advice: str = ""


@dataclass(frozen=True)
class Pair:
    """What was measured between two hosts, by one rank of each: latency, clocks and bandwidth both ways."""

    ranks: tuple[int, int]
    latency_s: float  # of a message of 8 bytes, one way
    there_bytes_per_s: float
    back_bytes_per_s: float
    clock_s: float  # the second's clock minus the first's
    clock_error_s: float  # how far that may be off


@dataclass(frozen=True)
class Job:
    """All that the checks look at.

    Args:
        facts: the facts of each rank, or of one process without a job.
        failures: why ranks did not start, join or answer.
        pairs: what was measured between hosts, or between two ranks of the only host.
        shared: the ranks of each set that can share memory; None if that is unknown.
    """

    facts: Sequence[Facts]
    failures: Sequence[str] = ()
    pairs: Sequence[Pair] = ()
    shared: Sequence[Sequence[int]] | None = None
    hosts: Mapping[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", hosts_of(self.facts))

    def of_ranks(self, name: str) -> list[Any]:
        """Returns the fact `name` of every rank. Raises BrokenFactError if a probe failed."""
        for rank, facts in enumerate(self.facts):
            if isinstance(facts[name], Mapping) and "broken" in facts[name]:
                raise BrokenFactError(f"rank {rank} cannot tell its {name}: {facts[name]['broken']}")
        return [facts[name] for facts in self.facts]

    def of_hosts(self, name: str) -> dict[str, Any]:
        """Returns the fact `name` of the first rank of every host."""
        every = self.of_ranks(name)
        return {host: every[ranks[0]] for host, ranks in self.hosts.items()}


Finding = tuple[str, str, str]  # status, finding, advice


Findings = Generator[Finding, None, str]


def check(name: str) -> Callable[[Callable[[Job], Findings]], Callable[[Job], list[Row]]]:
    """Makes a check of a generator. If it yields nothing, its return value is the finding of an ok row; "": no row."""

    def of(find: Callable[[Job], Findings]) -> Callable[[Job], list[Row]]:
        @wraps(find)
        def rows(job: Job) -> list[Row]:
            found, findings = [], find(job)
            while True:
                try:
                    found.append(Row(name, *next(findings)))
                except StopIteration as end:
                    return found or ([Row(name, OK, end.value)] if end.value else [])

        return rows

    return of


def hosts_of(facts: Sequence[Facts]) -> dict[str, list[int]]:
    """Returns the ranks of each host, by the host's name. Ranks with equal machine and network share a host.

    Hosts with the same name, such as containers, get the number of their first rank after the name.
    """
    groups: dict[str, list[int]] = {}
    for rank, own in enumerate(facts):
        identity = own["host"].get("id", f"unknown, rank {rank}")  # where the probe failed
        groups.setdefault(identity, []).append(rank)
    names = [facts[ranks[0]]["host"].get("name", f"rank {ranks[0]}") for ranks in groups.values()]
    found = {}
    for name, ranks in zip(names, groups.values(), strict=True):
        found[name if names.count(name) == 1 else f"{name} (rank {ranks[0]})"] = ranks
    return found


def differing(values: Sequence[Any], what: str, advice: str) -> list[Finding]:
    """Returns an error that says which ranks have which value, or nothing if all values are equal."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(rank)
    if len(by_value) < 2:
        return []
    listing = "; ".join(f"{value} on rank {_listed(ranks)}" for value, ranks in by_value.items())
    return [(ERROR, f"{what} differs: {listing}", advice)]


def how_many(job: Job) -> str:
    """Returns the number of ranks and hosts in words."""
    count, hosts = len(job.facts), len(job.hosts)
    return f"{count} ranks on {hosts} host{'s' if hosts > 1 else ''}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
