# The stall watch: notices that this rank waits too long for others or others for it, logs who waits for what and which
# ranks have not come, and can end the wait. The engine opens a Watch for each model. Two threads of the process call it
# (stall_threads.py); the words are in stall_text.py, what ranks tell each other in stall_notes.py. It takes part in no
# collective.
"""The stall watch of a model: ``Watch`` and ``Limits``."""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gossamer import config
from gossamer.errors import CommError
from gossamer.observe import stall_text
from gossamer.observe.stall_notes import BEFORE_BUCKETS, Note, Notes, Wait, waits_of
from gossamer.observe.stall_threads import LONGEST_TICK_S, threads

_log = logging.getLogger("gossamer")
_SAME_S = 0.1  # two waits that begin within it are one: clocks are not exact
_WRITTEN_S = 1.0  # how long an end waits until the other ranks can read why


@dataclass(frozen=True)
class Limits:
    """When a wait is told of, and when it ends, in seconds; 0: never."""

    warning_s: float
    shutdown_s: float

    @staticmethod
    def configured() -> "Limits":
        """Those of gossamer.config."""
        settings = config.current()
        return Limits(settings.stall_warning_s, settings.stall_shutdown_s)

    @property
    def shortest_s(self) -> float:
        """The first that counts; 0 if none does."""
        return min((each for each in (self.warning_s, self.shutdown_s) if each > 0), default=0.0)


class Watch:
    """The watch of one model on this rank.

    Args:
        native: the model's engine, which it does not keep alive: its step, activity() and tell_stall().
        describe: of a bucket's number, for people; the same on all ranks.
        rank, size: in the model's group.
        store: a torch.distributed store of that group, with a prefix of this model's own; None: there is none.
        limits: when it speaks and ends; the same on all ranks.
        unit: what native.step counts.
    """

    def __init__(
        self,
        native: Any,
        rank: int,
        size: int,
        *,
        describe: Callable[[int], str],
        store: Any,
        limits: Limits,
        unit: str = "step",
    ) -> None:
        self.tick_s = min(limits.shortest_s / 4, LONGEST_TICK_S)
        self.thread = threading.get_ident()  # that trains this model
        self._native, self._describe, self._limits = weakref.ref(native), describe, limits
        self._rank, self._size, self._unit = rank, size, unit
        self._calls: list[Wait] = []
        self._notes = Notes(store, rank, size, patience_s=3 * self.tick_s + 1)
        self._since = 0.0  # of the wait that is too long
        self._facts = self._ended = ""  # what is known of it, and what it was when it ended this training
        self._last_waits: list[Wait] = []  # then
        self._written = threading.Event()  # a note that says so
        self._late: dict[
            int, int
        ] = {}  # ranks that wait for this one: the ask with which they have first said so
        self._told = {"waits": 0, "waited for": 0}
        if limits.shortest_s > 0 and size > 1:
            threads.add(self)

    def close(self) -> None:
        """Nothing is watched any more. Idempotent."""
        threads.discard(self)

    def begin(self) -> None:
        """Of a forward: on the thread that trains this model, whose stack may be shown."""
        self.thread = threading.get_ident()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a collective of the thread that trains, which the engine knows nothing of."""
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

    # --- the thread that speaks ---

    def look(self) -> None:
        """Logs, tells the engine, and ends it: whatever is due now."""
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

    def _look_at_others(self, native: Any, waits: list[Wait]) -> None:
        """Whether they wait for this rank, which is in something else or a step behind."""
        step = native.step
        late = {
            rank: note
            for rank, note in self._notes.of_this_stall().items()
            if note["late"]
            and note["step"] >= step
            and not (note["step"] == step and Wait._make(note["waits"][0]).is_passed_in(waits))
        }
        # Said twice: a note may be from before this rank has come.
        known = self._late
        self._late = {rank: known[rank] if rank in known else note["asks"] for rank, note in late.items()}
        late = {rank: note for rank, note in late.items() if note["ended"] or note["asks"] > self._late[rank]}
        if not late:
            self._told["waited for"] = 0
            return
        what, _, seconds, _ = max((note["waits"][0] for note in late.values()), key=lambda wait: wait[2])
        first = next(iter(late.values()))
        here = self._place(step)
        wait = f"{stall_text.name_ranks(late)} in {self._unit} {first['step']} for {seconds:.0f} s: {what}"
        if any(note["ended"] for note in late.values()):
            self._end(native, f"{here}: waited for by {wait}; ended there, as stall_shutdown_s says", waits)
        elif self._is_due("waited for", seconds):
            stack = stall_text.stack_of(self.thread)
            _log.warning("gossamer: %s: waited for by %s. Its thread that trains:\n%s", here, wait, stack)

    def _is_due(self, kind: str, age: float) -> bool:
        """Whether it is told now: after warning_s, and again after as many more."""
        turn = int(age / self._limits.warning_s) if self._limits.warning_s > 0 else 0
        before, self._told[kind] = self._told[kind], turn
        return turn > before

    def _go_on(self, native: Any) -> None:
        if self._told["waits"]:
            seconds = time.time() - self._since
            _log.warning("gossamer: rank %d/%d goes on after %.0f s", self._rank, self._size, seconds)
        self._told["waits"], self._facts = 0, ""
        native.tell_stall("", False)

    def _end(self, native: Any, facts: str, waits: list[Wait]) -> None:
        self._last_waits = waits
        self._facts = self._ended = facts
        _log.error("gossamer: %s", facts)
        threads.hurry()
        if not self._notes.ignorance:
            self._written.wait(_WRITTEN_S)
        native.tell_stall(facts, True)

    # --- what there is to say ---

    def _waits(self, native: Any) -> list[Wait]:
        """What this rank waits for, the oldest first."""
        found = waits_of(native.activity(), self._describe)
        # What began at about the same time: buckets first.
        return sorted(
            [*found, *self._calls], key=lambda wait: (round(wait.since, 1), wait.bucket < 0, wait.bucket)
        )

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
        fates = "; ".join(self._notes.fate(rank, step) for rank in missing[: stall_text.SHOWN])
        return f"{text} for {stall_text.name_ranks(missing)}: {fates}"

    def _report(self, step: int, waits: list[Wait]) -> str:
        head = f"gossamer: {self._place(step)}: waits for other ranks\n"
        now, known, absent, lines = time.time(), not self._notes.ignorance, set(), []
        for wait in waits:
            missing = self._notes.missing(wait, step) if known else []
            here = {*range(self._size)} - {*missing} if known else {self._rank}
            absent |= {*missing}
            lines.append(
                stall_text.waiting_line(
                    wait.what, now - wait.since, doing=wait.doing, here=here, missing=missing
                )
            )
        text = head + stall_text.list_lines(lines)
        if not known:
            return f"{text}\n  which ranks have not come is not known: {self._notes.ignorance}"
        if not absent:
            return f"{text}\n  all ranks have come, so the transfer itself is slow or lost"
        fates = [self._notes.fate(rank, step) for rank in sorted(absent)]
        return f"{text}\n{stall_text.list_lines(fates)}"

    # --- the thread that talks to the store ---

    def exchange(self) -> None:
        """Asks the other ranks if this one waits long, and answers if any asks."""
        native = self._native()
        if native is None:
            return
        ended = self._ended
        waits = self._last_waits if ended else self._waits(native)
        age = time.time() - waits[0].since if waits else 0.0
        asking = bool(ended) or age >= self._limits.shortest_s / 2

        def write(asks: int) -> Note:
            now = time.time()
            return {
                "asks": asks,
                "step": native.step,
                "unit": self._unit,
                "waits": [wait._replace(since=now - wait.since) for wait in waits[: stall_text.SHOWN]],
                "late": bool(waits) and age >= self._limits.shortest_s,
                "ended": ended,
                "at": stall_text.place_of(self.thread),
                "host": stall_text.this_host(),
                "pid": os.getpid(),
            }

        self._notes.exchange(write, asking=asking)
        if ended:
            self._written.set()
