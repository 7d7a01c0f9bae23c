"""``Timeline``: rank 0's Chrome trace of the negotiation, with Horovod's names of events.

The native core reports events from its threads. A thread of the timeline writes them every 0.05 s, so the file of a job
that hangs or is killed has them. Open it with chrome://tracing or ui.perfetto.dev.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gossamer.observe.trace_file import TraceFile

WRITE_S = 0.05  # an event is in the file this long after it happened


class Timeline:
    """A JSON array of events. Each operation name is a process of the trace; times are microseconds from the start."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._file: TraceFile | None = None
        self._is_written = True

    def start(self, path: str, *, mark_cycles: bool) -> None:
        """Begins a file. Raises ValueError if it cannot be written."""
        self.stop()
        try:
            file = TraceFile(path)
        except OSError as error:
            raise ValueError(
                f"hvd: the timeline must be a file that can be written, got {path!r}: {error}"
            ) from error
        with self._lock:
            self._file = file
            self._mark_cycles = mark_cycles
            self._epoch = time.monotonic()
            self._numbers: dict[tuple[int, str], int] = {}
            self._open: dict[int, list[str]] = {}  # the phases under way, by number of the operation
            self._deciding = False
            args = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            file.event("start_time", "M", pid=0, args=args)
            self._is_written = False
        threading.Thread(target=self._write_by_the_clock, args=(file,), name="timeline", daemon=True).start()

    def stop(self) -> None:
        """Ends the file, if one is being written."""
        with self._lock:
            file, self._file = self._file, None
            self._lock.notify_all()
            if file is not None:
                file.close()

    def _write_by_the_clock(self, file: TraceFile) -> None:
        """Runs until the file ends. Sleeps while nothing happens."""
        with self._lock:
            while self._file is file:
                self._lock.wait_for(lambda: self._file is not file or not self._is_written)
                if not self._lock.wait_for(lambda: self._file is not file, WRITE_S):
                    file.flush()
                    self._is_written = True

    def listener(self, process_set: int) -> Callable[[str, str, int, float], None]:
        """Returns the function that the native core of one process set calls."""
        return partial(self._event, process_set)

    def _event(self, process_set: int, phase: str, name: str, rank: int, time_s: float) -> None:
        with self._lock:
            if self._file is None:
                return
            if phase != "rank_ready" and (process_set, name) not in self._numbers:
                return  # the operation began before the file
            number = self._number(process_set, name)
            kind = name.split(".", 1)[0].removeprefix("grouped_").upper()
            if phase == "rank_ready":
                self._begin(number, f"NEGOTIATE_{kind}", time_s)
                self._write(number, str(rank), time_s, ph="X", dur=0)
            elif phase == "agreed":
                if (
                    self._mark_cycles and not self._deciding
                ):  # one marker for all operations agreed on at once
                    self._write(0, "CYCLE_START", time_s, ph="i", s="g")
                self._end(number, time_s)
            elif phase == "executing":
                self._end(number, time_s)
                self._begin(number, kind, time_s)
            elif phase == "done":
                self._end(number, time_s)
            self._deciding = phase == "agreed"
            if self._is_written:
                self._is_written = False
                self._lock.notify_all()

    def _number(self, process_set: int, name: str) -> int:
        key = process_set, name
        if key not in self._numbers:
            number = self._numbers[key] = len(self._numbers) + 1
            shown = name if process_set == 0 else f"{name} (process set {process_set})"
            self._write(number, "process_name", None, ph="M", args={"name": shown})
            self._write(number, "process_sort_index", None, ph="M", args={"sort_index": number})
        return self._numbers[key]

    def _begin(self, number: int, name: str, time_s: float) -> None:
        if name not in self._open.setdefault(number, []):
            self._open[number].append(name)
            self._write(number, name, time_s, ph="B")

    def _end(self, number: int, time_s: float) -> None:
        while self._open.get(number):
            self._write(number, self._open[number].pop(), time_s, ph="E")

    def _write(self, number: int, name: str, time_s: float | None, *, ph: str, **fields: Any) -> None:
        assert self._file is not None
        ts_us = None if time_s is None else (time_s - self._epoch) * 1e6
        self._file.event(name, ph, pid=number, ts_us=ts_us, **fields)
