# The output of the workers on its way to the user. torch's agent, or ssh.py for other hosts, writes "[rank] " before
# each line, from a thread for each worker. Here the pieces of a line are put together, and a line also goes to a file
# of its rank, or gets the time in front. run.py, fleet.py and the agents on other hosts open it.
"""Output of the workers, line by line and split by rank."""

import argparse
import datetime
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gossamer.errors import ConfigError

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
RANK = re.compile(r"\[(\d+)\] ")


class Output:
    """Takes the place of sys.stdout or sys.stderr, and passes on what is written in whole lines.

    A worker may write a line in pieces. torch's agent passes on each piece that it finds, with the prefix before it,
    and another worker's line could come between two pieces. So a piece without a line's end waits here for the rest.
    """

    def __init__(
        self, stream: TextIO, name: str, *, folder: Path | None = None, width: int = 1, times: bool = False
    ) -> None:
        self._stream, self._name, self._folder, self._width, self._times = stream, name, folder, width, times
        self._prefix = _prefix_pattern()
        self._files: dict[int, TextIO] = {}
        self._lock = threading.Lock()
        self._begun: dict[
            threading.Thread, str
        ] = {}  # lines without their ends, by the thread that writes them

    def write(self, text: str) -> int:
        writer = threading.current_thread()
        with self._lock:
            begun = self._begun.pop(writer, "")
            for ended in [thread for thread in self._begun if not thread.is_alive()]:
                self._pass_on(self._begun.pop(ended) + "\n")
            prefix = self._prefix.match(text) if self._prefix.match(begun) else None
            lines = begun + (text[prefix.end() :] if prefix else text)
            whole = lines.rfind("\n") + 1
            self._pass_on(lines[:whole])
            if lines[whole:]:
                self._begun[writer] = lines[whole:]
        return len(text)

    def close(self) -> None:
        """Passes on the lines that have no end, and closes the files."""
        with self._lock:
            for line in self._begun.values():
                self._pass_on(line + "\n")
            self._begun.clear()
            for file in self._files.values():
                file.close()
            self._folder = None

    def _pass_on(self, lines: str) -> None:
        for line in io.StringIO(lines):
            match = RANK.match(line)
            if match and self._folder is not None:
                self._file(int(match[1])).write(line[match.end() :])
            now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
            self._stream.write(f"{now} {line}" if self._times else line)

    def _file(self, rank: int) -> TextIO:
        if rank not in self._files:
            assert self._folder is not None
            folder = self._folder / f"rank.{rank:0{self._width}}"
            folder.mkdir(parents=True, exist_ok=True)
            self._files[rank] = (folder / self._name).open("w", buffering=1)
        return self._files[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _prefix_pattern() -> re.Pattern[str]:
    """Returns the pattern of what torch's agent writes before a line: the user's, `gossamer run`'s or its own."""
    users = re.sub(r"\\\$\\\{\w+\\\}", r"\\w+", re.escape(os.environ.get(PREFIX, "[${rank}] ")))
    return re.compile(rf"{users}|{RANK.pattern}|\[\w+\]:")


@contextmanager
def whole_lines(**settings: Any) -> Iterator[None]:
    """Puts an ``Output`` with these settings in the places of sys.stdout and sys.stderr."""
    kept = sys.stdout, sys.stderr
    outputs = Output(kept[0], "stdout", **settings), Output(kept[1], "stderr", **settings)
    sys.stdout, sys.stderr = outputs
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept
        for output in outputs:
            output.close()


@contextmanager
def splitting(args: argparse.Namespace, size: int) -> Iterator[None]:
    """Puts what these flags ask for in the places of sys.stdout and sys.stderr, in a run of ``size`` workers."""
    folder = None
    if args.output_filename is not None:
        if (args.tee, args.redirects) != ("0", "0"):
            raise ConfigError(
                f"--output-filename does not go with --tee and --redirects, got {args.tee} and {args.redirects}"
            )
        folder = Path(args.output_filename)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output-filename must name a folder: {error}") from error
        os.environ[PREFIX] = "[${rank}] "  # a line's rank is read from it
    width = len(str(size - 1))
    with whole_lines(folder=folder, width=width, times=args.prefix_output_with_timestamp):
        yield
