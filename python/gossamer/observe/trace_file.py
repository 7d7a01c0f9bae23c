"""Writes Chrome traces (chrome://tracing, ui.perfetto.dev), event by event.

timeline.py writes the merged trace of all ranks with it, and the Horovod face its own timeline.
"""

import json
from pathlib import Path
from typing import Any, TextIO


class TraceFile:
    """A JSON file of trace events. Events are written at once; the JSON is valid when the file is closed.

    Args:
        path: the file, which is replaced.
        metadata: the content of "otherData" beside the events; None: the file is a plain array of events.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | Path, metadata: dict[str, Any] | None = None) -> None:
        self._file: TextIO = Path(path).open("w")  # noqa: SIM115  (closed by close)
        self._end = "\n]\n" if metadata is None else "\n]}\n"
        if metadata is not None:
            head = json.dumps({"displayTimeUnit": "ms", "otherData": metadata})
            self._file.write(f'{head[:-1]}, "traceEvents": ')
        self._file.write("[\n")
        self._first = True

    def event(
        self, name: str, ph: str, *, pid: int, tid: int = 0, ts_us: float | None = None, **more: Any
    ) -> None:
        """Write one event.

        Args:
            ph: the kind of event, a letter of the format.
            ts_us: its time in microseconds.
            more: its other fields.
        """
        event: dict[str, Any] = {"name": name, "pid": pid, "tid": tid, "ph": ph, **more}
        if ts_us is not None:
            event["ts"] = round(ts_us, 3)
        self._file.write(("" if self._first else ",\n") + json.dumps(event))
        self._first = False

    def flush(self) -> None:
        """Make the events so far visible to readers of the file."""
        self._file.flush()

    def close(self) -> None:
        """Complete the JSON and close the file."""
        self._file.write(self._end)
        self._file.close()
