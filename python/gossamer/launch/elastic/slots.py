# Where workers of an elastic run may be: hosts and their slots, fixed or from a script that runs every second, and
# which slots rest after a failure. It starts no worker and knows no group. Used by driver.py.
"""Hosts and slots of an elastic run."""

import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gossamer.errors import ConfigError

ASK_S = 1.0  # between two runs of the discovery script
SCRIPT_TIMEOUT_S = 60.0


@dataclass(frozen=True, order=True)
class Slot:
    """A place for one worker: a host, and a number on it that counts from 0."""

    host: str
    index: int


def parse_hosts(text: str, *, default_slots: int | None) -> dict[str, int]:
    """Parses lines "host:slots", or "host" if `default_slots` is given. Returns slots by host, in the same order.

    Raises:
        ConfigError: a line has another form, a number is below 0, or a host stands twice.
    """
    hosts: dict[str, int] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        host, colon, number = line.rpartition(":")
        if not colon:
            host, number = line, "" if default_slots is None else str(default_slots)
        if not host or not number.isdigit() or host in hosts:
            raise ConfigError(
                f"host discovery: each line must be host:slots, each host once, or host alone with "
                f"--slots-per-host, got {line!r}"
            )
        hosts[host] = int(number)
    return hosts


def seats(slots: dict[int, Slot]) -> dict[int, dict[str, int]]:
    """Returns the places of workers, whose slots are given in rank order.

    A worker's local rank is its slot's number if possible, so that the worker keeps its GPU and no other gets it.
    """
    hosts = list(dict.fromkeys(slot.host for slot in slots.values()))
    local: dict[int, int] = {}
    for host in hosts:
        here = {number: slot.index for number, slot in slots.items() if slot.host == host}
        keeping = {number: index for number, index in here.items() if index < len(here)}
        free = iter(sorted(set(range(len(here))) - set(keeping.values())))
        local |= {number: keeping[number] if number in keeping else next(free) for number in here}
    return {
        number: {
            "rank": rank,
            "local_rank": local[number],
            "local_size": sum(other.host == slot.host for other in slots.values()),
            "node_rank": hosts.index(slot.host),
        }
        for rank, (number, slot) in enumerate(slots.items())
    }


class Discovery:
    """Runs a script each second, on a thread of its own, and reads its lines "host:slots".

    Args:
        command: a command of the shell.
        default_slots: the slots of hosts whose line has no number.

    Raises:
        ConfigError: the first run of the script fails, or prints something else.
    """

    def __init__(self, command: str, *, default_slots: int | None) -> None:
        self._command, self._default = command, default_slots
        self._found = self._ask()
        self._complaint = ""
        threading.Thread(target=self._keep_asking, daemon=True).start()

    def __call__(self) -> dict[str, int]:
        """Returns the hosts of the last run without an error."""
        return self._found

    def _ask(self) -> dict[str, int]:
        where, limit_s = f"host discovery: {self._command!r}", SCRIPT_TIMEOUT_S
        try:
            done = subprocess.run(self._command, shell=True, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{where} has not ended in {limit_s:g} s") from None
        if done.returncode:
            raise ConfigError(f"{where} ended with code {done.returncode}: {done.stderr.strip()}")
        return parse_hosts(done.stdout, default_slots=self._default)

    def _keep_asking(self) -> None:
        while True:
            time.sleep(ASK_S)
            try:
                self._found, self._complaint = self._ask(), ""
            except ConfigError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    print(f"gossamer run: {error}; the hosts known before are kept", file=sys.stderr)


class Slots:
    """The slots that exist now, and the slots that rest after a failure.

    Args:
        hosts: the slots by host, in order of preference, or what returns them, called at every look.
        cooldown_s: the shortest and the longest rest of a slot after a failure; each failure doubles it. None: a slot
            is not used again.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        hosts: Mapping[str, int] | Callable[[], Mapping[str, int]],
        cooldown_s: tuple[float, float] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts, self._cooldown_s, self._clock = hosts, cooldown_s, clock
        self._failures: dict[Slot, int] = {}
        self._rests_until: dict[Slot, float] = {}

    def present(self) -> list[Slot]:
        """Returns all slots, with those that rest."""
        hosts = self._hosts() if callable(self._hosts) else self._hosts
        return [Slot(host, index) for host, count in hosts.items() for index in range(count)]

    def usable(self) -> list[Slot]:
        """Returns the slots that do not rest."""
        now = self._clock()
        return [slot for slot in self.present() if self._rests_until.get(slot, 0.0) <= now]

    def at_most(self) -> float:
        """Returns how many workers there can be: any number if hosts may change or slots may be used again."""
        return math.inf if callable(self._hosts) or self._cooldown_s is not None else len(self.usable())

    def fail(self, slot: Slot) -> None:
        """Notes that the slot's worker has died."""
        self._failures[slot] = count = self._failures.get(slot, 0) + 1
        rest = math.inf
        if self._cooldown_s is not None:
            low, high = self._cooldown_s
            # Slots that failed together should not all come back together.
            rest = min(high, low * 2.0 ** (count - 1) * random.uniform(1.0, 1.25))
        self._rests_until[slot] = self._clock() + rest
