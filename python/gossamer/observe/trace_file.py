# The writer of Chrome traces (chrome://tracing, ui.perfetto.dev), event by event. It knows the format and no meaning:
# timeline.py writes the merged trace of all ranks with it, horovod/common/timeline.py Horovod's.
"""A JSON file of trace events."""

import json
from pathlib import Path
from typing import Any, TextIO


class TraceFile:
    """Written as it goes; valid JSON once it is closed.

    Args:
        path: the file, which is replaced.
        metadata: what goes beside the events, under "otherData"; None: the file is a plain array of events.

    Raises:
        OSError: it cannot be written.
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
        """One event of the format: `ph` says of which kind, `ts_us` when, `more` its other fields."""
        event: dict[str, Any] = {"name": name, "pid": pid, "tid": tid, "ph": ph, **more}
        if ts_us is not None:
            event["ts"] = round(ts_us, 3)
        self._file.write(("" if self._first else ",\n") + json.dumps(event))
        self._first = False

    def flush(self) -> None:
        """So that a reader sees what there is."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.write(self._end)
        self._file.close()
