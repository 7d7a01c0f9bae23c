"""The watch of one model: it notices that this rank waits too long for others, or others for it.

It logs who waits for what and which ranks have not come, and it can end the wait. The engine opens a Watch for each
model. Two threads of the process call it (threads.py): one calls look(), the other exchange().
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from gossamer import config
from gossamer.errors import CommError
from gossamer.observe.stall.notes import Note, Notes
from gossamer.observe.stall.text import (
    SHOWN,
    list_lines,
    name_ranks,
    place_of,
    stack_of,
    this_host,
    waiting_line,
)
from gossamer.observe.stall.threads import LONGEST_TICK_S, threads
from gossamer.observe.stall.waits import BEFORE_BUCKETS, Wait, waits_of

_log = logging.getLogger("gossamer")
_SAME_S = 0.1  # two waits that begin within this time are one: clocks are not exact
_WRITTEN_S = 1.0  # how long an end waits until the other ranks can read its reason


@dataclass(frozen=True)
class Limits:
    """When a wait is logged, and when the watch ends it.

    Attributes:
        warning_s: seconds until a wait is logged, and logged again; 0: never.
        shutdown_s: seconds until a wait ends with an error; 0: never.
    """

    warning_s: float
    shutdown_s: float

    @staticmethod
    def configured() -> "Limits":
        """Return the limits of gossamer.config."""
        settings = config.current()
        return Limits(settings.stall_warning_s, settings.stall_shutdown_s)

    @property
    def shortest_s(self) -> float:
        """The shorter limit that is not 0; 0 if both are."""
        return min((each for each in (self.warning_s, self.shutdown_s) if each > 0), default=0.0)


class Watched(Protocol):
    """What a watch asks of the native engine, or of whatever else it watches."""

    @property
    def step(self) -> int: ...
    def activity(self) -> list[tuple[str, int, float]]: ...
    def tell_stall(self, facts: str, stop: bool) -> None: ...


class Watch:
    """The watch of one model on this rank.

    Args:
        native: the model's engine. The watch does not keep it alive.
        rank, size: this rank and the number of ranks in the model's group.
        describe: returns the text for a bucket's number; equal on all ranks.
        store: a store of the group, with a prefix of this model's own; None if there is none.
        limits: when the watch logs and when it ends a wait; equal on all ranks.
        unit: what native.step counts.
    """

    def __init__(
        self,
        native: Watched,
        rank: int,
        size: int,
        *,
        describe: Callable[[int], str],
        store: dist.Store | None,
        limits: Limits,
        unit: str = "step",
    ) -> None:
        self.tick_s: float = min(limits.shortest_s / 4, LONGEST_TICK_S)
        # The first exchange makes a connection to the store, whose host may look up the name of this one for seconds.
        self._quiet_until = time.time() + self.tick_s
        self.thread: int = threading.get_ident()  # the thread that trains this model
        self._native, self._describe, self._limits = weakref.ref(native), describe, limits
        self._rank, self._size, self._unit = rank, size, unit
        self._calls: list[Wait] = []
        self._notes = Notes(store, rank, size, patience_s=3 * self.tick_s + 1)
        self._since = 0.0  # when the wait began that is too long
        self._facts = ""  # what is known of that wait
        self._ended = ""  # what was known of the wait that ended the training
        self._last_waits: list[Wait] = []  # the waits at that end
        self._written = threading.Event()  # set when a note with that reason is in the store
        # Ranks that wait for this one, with the counter of the first note that says so.
        self._late: dict[int, int] = {}
        self._told = {"waits": 0, "waited for": 0}
        if limits.shortest_s > 0 and size > 1:
            threads.add(self)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        threads.discard(self)

    def begin(self) -> None:
        """Note the calling thread as the one that trains. Called at each forward; a report may show its stack."""
        self.thread = threading.get_ident()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Watch a collective that the training thread makes itself, outside of the engine.

        Raises:
            CommError: the error of the body, with what the watch knows of the wait.
        """
        call = Wait(what, BEFORE_BUCKETS, time.time())
        self._calls.append(call)
        try:
            yield
        except CommError as error:
            if self._facts:
                raise CommError(f"{self._facts}: {error}") from error
            raise
        finally:
            self._calls.remove(call)

    # --- called by the thread that looks ---

    def look(self) -> None:
        """Log a wait, tell the engine about it, or end it, whatever is due now."""
        native = self._native()
        if native is None or self._ended:
            return
        waits = self._waits(native)
        if self._facts and (not waits or abs(waits[0].since - self._since) > _SAME_S):
            self._go_on(native)
        age = time.time() - waits[0].since if waits else 0.0
        if waits and age >= self._limits.shortest_s:
            self._since, self._facts = waits[0].since, self._facts_of(native.step, waits[0])
            if 0 < self._limits.shutdown_s <= age:
                ended = f"{self._facts}; ended, as stall_shutdown_s is {self._limits.shutdown_s:g}"
                self._end(native, ended, waits)
                return
            native.tell_stall(self._facts, False)
            if self._is_due("waits", age):
                _log.warning("%s", self._report(native.step, waits))
        self._look_at_others(native, waits)

    def _look_at_others(self, native: Watched, waits: list[Wait]) -> None:
        """Notice that other ranks wait for this one, which does something else or is a step behind."""
        step = native.step
        late = {
            rank: note
            for rank, note in self._notes.of_this_stall().items()
            if note["late"]
            and note["step"] >= step
            and not (note["step"] == step and Wait._make(note["waits"][0]).is_passed_in(waits))
        }
        # Two notes must say so: the first one may be from before this rank came.
        known = self._late
        self._late = {rank: known[rank] if rank in known else note["asks"] for rank, note in late.items()}
        late = {rank: note for rank, note in late.items() if note["ended"] or note["asks"] > self._late[rank]}
        if not late:
            self._told["waited for"] = 0
            return
        what, _, seconds, _ = max((note["waits"][0] for note in late.values()), key=lambda wait: wait[2])
        first = next(iter(late.values()))
        here = self._place(step)
        wait = f"{name_ranks(late)} in {self._unit} {first['step']} for {seconds:.0f} s: {what}"
        if any(note["ended"] for note in late.values()):
            self._end(native, f"{here}: waited for by {wait}; ended there, as stall_shutdown_s says", waits)
        elif self._is_due("waited for", seconds):
            stack = stack_of(self.thread)
            _log.warning("gossamer: %s: waited for by %s. Its thread that trains:\n%s", here, wait, stack)

    def _is_due(self, kind: str, age: float) -> bool:
        """Whether a log line is due: after warning_s, and again after every further warning_s."""
        turn = int(age / self._limits.warning_s) if self._limits.warning_s > 0 else 0
        before, self._told[kind] = self._told[kind], turn
        return turn > before

    def _go_on(self, native: Watched) -> None:
        if self._told["waits"]:
            seconds = time.time() - self._since
            _log.warning("gossamer: rank %d/%d goes on after %.0f s", self._rank, self._size, seconds)
        self._told["waits"], self._facts = 0, ""
        native.tell_stall("", False)

    def _end(self, native: Watched, facts: str, waits: list[Wait]) -> None:
        self._last_waits = waits
        self._facts = self._ended = facts
        _log.error("gossamer: %s", facts)
        threads.hurry()
        if not self._notes.ignorance:
            self._written.wait(_WRITTEN_S)
        native.tell_stall(facts, True)

    # --- what there is to say ---

    def _waits(self, native: Watched) -> list[Wait]:
        """Return what this rank waits for, the oldest first."""
        found = waits_of(native.activity(), self._describe)
        found += self._calls
        # Buckets come first among waits that began at about the same time.
        return sorted(found, key=lambda wait: (round(wait.since, 1), wait.bucket < 0, wait.bucket))

    def _place(self, step: int) -> str:
        return f"rank {self._rank}/{self._size} {self._unit} {step}"

    def _facts_of(self, step: int, wait: Wait) -> str:
        seconds = time.time() - wait.since
        text = f"{self._place(step)}: {wait.what} has waited {seconds:.0f} s"
        if self._notes.ignorance:
            return f"{text}; which ranks have not come is not known: {self._notes.ignorance}"
        missing = self._notes.missing(wait, step)
        if not missing:
            return f"{text}; all ranks have come, so the transfer itself is slow or lost"
        fates = "; ".join(self._notes.fate(rank, step) for rank in missing[:SHOWN])
        return f"{text} for {name_ranks(missing)}: {fates}"

    def _report(self, step: int, waits: list[Wait]) -> str:
        head = f"gossamer: {self._place(step)}: waits for other ranks\n"
        now, known, absent, lines = time.time(), not self._notes.ignorance, set(), []
        for wait in waits:
            missing = self._notes.missing(wait, step) if known else []
            here = {*range(self._size)} - {*missing} if known else {self._rank}
            absent |= {*missing}
            lines.append(
                waiting_line(wait.what, now - wait.since, doing=wait.doing, here=here, missing=missing)
            )
        text = head + list_lines(lines)
        if not known:
            return f"{text}\n  which ranks have not come is not known: {self._notes.ignorance}"
        if not absent:
            return f"{text}\n  all ranks have come, so the transfer itself is slow or lost"
        fates = [self._notes.fate(rank, step) for rank in sorted(absent)]
        return f"{text}\n{list_lines(fates)}"

    # --- called by the thread that talks to the store ---

    def exchange(self) -> None:
        """Ask the other ranks if this rank waits long, and answer if another rank asks."""
        native = self._native()
        if native is None:
            return
        ended = self._ended
        waits = self._last_waits if ended else self._waits(native)
        age = time.time() - waits[0].since if waits else 0.0
        asking = bool(ended) or age >= self._limits.shortest_s / 2
        if not asking and time.time() < self._quiet_until:
            return

        def write(asks: int) -> Note:
            now = time.time()
            return {
                "asks": asks,
                "step": native.step,
                "unit": self._unit,
                "waits": [wait._replace(since=now - wait.since) for wait in waits[:SHOWN]],
                "late": bool(waits) and age >= self._limits.shortest_s,
                "ended": ended,
                "at": place_of(self.thread),
                "host": this_host(),
                "pid": os.getpid(),
            }

        self._notes.exchange(write, asking=asking)
        if ended:
            self._written.set()
