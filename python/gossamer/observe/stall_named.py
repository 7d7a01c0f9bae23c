# The report of named operations (Horovod's face) that some ranks have submitted and others not. The native negotiation
# finds them, on the first rank of the set (csrc/negotiate/stall.h); this logs what it found on every rank.
"""``NamedWatch``: what one rank is told of stalled operations, on all ranks of the set."""

import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

from gossamer import _C
from gossamer.observe import stall_text
from gossamer.observe.stall_threads import LONGEST_TICK_S, threads

_log = logging.getLogger("gossamer")


class NamedWatch:
    """Of the named operations of one set of ranks.

    Args:
        rank: this one, as the operations' reports number the ranks; leads: it is the one that is told.
        store: a torch.distributed store of the set, with a prefix that nothing else uses.
        warning_s: after which operations are reported; 0: never.
    """

    def __init__(self, rank: int, *, leads: bool, store: Any, warning_s: float) -> None:
        self.tick_s = min(warning_s / 2, LONGEST_TICK_S)
        self._rank, self._leads = rank, leads
        self._store = store
        self._aside: _C.AsideStore | None = None  # from the first exchange on
        self._reports: list[str] = []  # that the others are to read
        self._seen, self._mute = 0, False
        if warning_s > 0:
            threads.add(self)

    def close(self) -> None:
        """Nothing is watched any more. Idempotent."""
        threads.discard(self)

    def report(self, stalled: Sequence[Any]) -> None:
        """Called by the negotiation, on a thread of its own, with a list of _C.Stalled."""
        text = stall_text.named_report(stalled)
        missing = sorted({rank for one in stalled for rank in one.missing})
        self._reports.append(json.dumps({"text": text, "missing": missing}))
        self._speak(text, missing)
        threads.hurry()

    def look(self) -> None:
        """Nothing to look at here: the negotiation does."""

    def exchange(self) -> None:
        """Hands reports over to the other ranks."""
        if self._mute:
            return
        try:
            if self._aside is None:
                self._aside = _C.AsideStore(self._store)
            if self._leads:
                while self._reports:
                    self._aside.set("report", self._reports.pop(0))
                    self._aside.add("reports", 1)
            elif (count := self._aside.add("reports", 0)) != self._seen:
                self._seen = count
                [text] = self._aside.get(["report"])
                report = json.loads(text)
                self._speak(report["text"], report["missing"])
        except RuntimeError:  # the session ends, or with its store all of it has ended
            self._mute = True

    def _speak(self, text: str, missing: Sequence[int]) -> None:
        if self._rank in missing:
            main = threading.main_thread().ident or 0
            text += f"\n  this is rank {self._rank}; its main thread:\n{stall_text.stack_of(main)}"
        _log.warning("%s", text)
