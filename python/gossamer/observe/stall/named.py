"""The watch of named operations (the Horovod face) that some ranks have submitted and others have not.

The native negotiation finds such operations on the first rank of the set (csrc/negotiate/stall.h). This module logs
on every rank what the negotiation has found.
"""

import json
import logging
import threading
from collections.abc import Sequence

import torch.distributed as dist

from gossamer import _C
from gossamer.observe.stall.text import named_report, stack_of
from gossamer.observe.stall.threads import LONGEST_TICK_S, threads

_log = logging.getLogger("gossamer")


class NamedWatch:
    """The watch of the named operations of one set of ranks.

    Args:
        rank: this rank, as the reports number the ranks.
        leads: this is the first rank of the set, which the negotiation reports to.
        store: a store of the set, with a prefix that nothing else uses.
        warning_s: seconds after which an operation is reported; 0: never.
    """

    def __init__(self, rank: int, *, leads: bool, store: dist.Store, warning_s: float) -> None:
        self.tick_s: float = min(warning_s / 2, LONGEST_TICK_S)
        self._rank, self._leads = rank, leads
        self._store = store
        self._aside: _C.AsideStore | None = None  # from the first exchange on
        self._reports: list[str] = []  # for the other ranks to read
        self._seen, self._mute = 0, False
        if warning_s > 0:
            threads.add(self)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        threads.discard(self)

    def report(self, stalled: Sequence[_C.Stalled]) -> None:
        """Log stalled operations here and on the other ranks. The negotiation calls this on a thread of its own."""
        report = named_report(stalled)
        missing = sorted({rank for one in stalled for rank in one.missing})
        self._reports.append(json.dumps({"text": report, "missing": missing}))
        self._speak(report, missing)
        threads.hurry()

    def look(self) -> None:
        """Do nothing: the negotiation looks."""

    def exchange(self) -> None:
        """Pass reports to the other ranks, or log those of the first rank."""
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
                [latest] = self._aside.get(["report"])
                report = json.loads(latest)
                self._speak(report["text"], report["missing"])
        except RuntimeError:  # the session ends, or its store is gone
            self._mute = True

    def _speak(self, report: str, missing: Sequence[int]) -> None:
        if self._rank in missing:
            main = threading.main_thread().ident or 0
            report += f"\n  this is rank {self._rank}; its main thread:\n{stack_of(main)}"
        _log.warning("%s", report)
