# The output of the workers on its way to the user. torch's agent, or fleet.py for other hosts, puts "[rank] " before
# each line. Here each line also goes to a file of its rank, or gets the time in front. run.py and fleet.py open it.
"""Output of the workers, split by rank."""

import argparse
import datetime
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from gossamer.errors import ConfigError

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
RANK = re.compile(r"\[(\d+)\] ")


class Output:
    """Takes the place of sys.stdout or sys.stderr, and passes on what is written, line by line."""

    def __init__(self, stream: TextIO, name: str, *, folder: Path | None, width: int, times: bool) -> None:
        self._stream, self._name, self._folder, self._width, self._times = stream, name, folder, width, times
        self._files: dict[int, TextIO] = {}
        self._lock = threading.Lock()
        self._begun = False  # a line whose end has not been written yet

    def write(self, text: str) -> int:
        with self._lock:
            for line in text.splitlines(keepends=True):
                match = RANK.match(line)
                if match and self._folder is not None:
                    self._file(int(match[1])).write(line[match.end() :])
                now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
                self._stream.write(f"{now} {line}" if self._times and not self._begun else line)
                self._begun = not line.endswith("\n")
        return len(text)

    def close_files(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._folder = None

    def _file(self, rank: int) -> TextIO:
        if rank not in self._files:
            assert self._folder is not None
            folder = self._folder / f"rank.{rank:0{self._width}}"
            folder.mkdir(parents=True, exist_ok=True)
            self._files[rank] = (folder / self._name).open("w", buffering=1)
        return self._files[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def splitting(args: argparse.Namespace, size: int) -> Iterator[tuple[Output, Output]]:
    """Yields what takes the place of stdout and stderr in a run of ``size`` workers with these flags."""
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
    settings: dict[str, Any] = {
        "folder": folder,
        "width": len(str(size - 1)),
        "times": args.prefix_output_with_timestamp,
    }
    with ExitStack() as stack:
        outputs = []
        for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
            outputs.append(Output(stream, name, **settings))
            stack.callback(outputs[-1].close_files)
        yield outputs[0], outputs[1]
