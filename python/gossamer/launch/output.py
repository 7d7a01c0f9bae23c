# The output of the workers on its way to the user. torch's agent, or fleet.py for other hosts, puts "[rank] " before
# each line. Here lines are kept whole, and each also goes to a file of its rank, or gets the time in front. here.py,
# fleet.py and elastic/ open it.
"""Output of the workers, line by line."""

import argparse
import contextlib
import datetime
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any, TextIO

from gossamer.errors import ConfigError

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
TEMPLATE = "[${rank}] "
TORCHS_TEMPLATE = "[${role_name}${local_rank}]:"  # what torch writes without a template


class Output:
    """Takes the place of sys.stdout or sys.stderr, and passes on whole lines.

    torch reads the output of each rank on a thread of its own. What it reads may end inside a line; it puts the header
    before each part all the same. So the part of a line is held until the same thread writes the rest or has ended.
    """

    def __init__(
        self,
        stream: TextIO,
        name: str,
        *,
        header: re.Pattern[str],
        folder: Path | None = None,
        width: int = 1,
        times: bool = False,
    ) -> None:
        self._stream, self._name, self._header = stream, name, header
        self._folder, self._width, self._times = folder, width, times
        self._files: dict[int, TextIO] = {}
        self._lock = threading.Lock()
        self._held: dict[threading.Thread, str] = {}

    def write(self, text: str) -> int:
        writer = threading.current_thread()
        with self._lock:
            begun = self._held.pop(writer, "")
            *lines, rest = (begun + self._header.sub("", text) if begun else text).split("\n")
            for line in lines:
                self._pass_on(line)
            if rest:
                self._held[writer] = rest
            for ended in [thread for thread in self._held if not thread.is_alive()]:
                self._pass_on(self._held.pop(ended))
        return len(text)

    def close(self) -> None:
        """Passes on what is held, and closes the files of the ranks."""
        with self._lock:
            with contextlib.suppress(OSError):  # nobody reads any more
                for rest in self._held.values():
                    self._pass_on(rest)
            for file in self._files.values():
                file.close()
            self._folder = None

    def _pass_on(self, line: str) -> None:
        if self._folder is not None and (match := self._header.match(line)):
            self._file(self._folder, int(match[1])).write(f"{line[match.end() :]}\n")
        now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._stream.write(f"{now} {line}\n" if self._times else f"{line}\n")
        self._stream.flush()

    def _file(self, folder: Path, rank: int) -> TextIO:
        if rank not in self._files:
            path = folder / f"rank.{rank:0{self._width}}" / self._name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files[rank] = path.open("w", buffering=1)
        return self._files[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def whole_lines(template: str = TEMPLATE, role: str = "", **settings: Any) -> Iterator[None]:
    """Lets nothing but whole lines pass to stdout and stderr.

    Args:
        template, role: of the header that torch puts before the lines of a worker.
        settings: of Output: a folder where each rank gets files of its own, the width of a rank in their names, and
            whether the time stands before each line.
    """
    number = "\0"
    header = re.escape(Template(template).safe_substitute(rank=number, local_rank=number, role_name=role))
    pattern = re.compile(r"\A" + header.replace(number, r"(\d+)"))
    with contextlib.ExitStack() as stack:
        redirects = {"stdout": contextlib.redirect_stdout, "stderr": contextlib.redirect_stderr}
        for name, redirect in redirects.items():
            output: Any = Output(getattr(sys, name), name, header=pattern, **settings)
            stack.callback(output.close)
            stack.enter_context(redirect(output))
        yield


def splitting(args: argparse.Namespace, size: int) -> contextlib.AbstractContextManager[None]:
    """Returns whole_lines() for a run of ``size`` workers with these flags, and sets torch's template for it."""
    teed = (args.tee, args.redirects) != ("0", "0")
    folder = None
    if args.output_filename is not None:
        if teed:
            raise ConfigError(
                f"--output-filename does not go with --tee and --redirects, got {args.tee} and {args.redirects}"
            )
        folder = Path(args.output_filename)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # logs may tell of data and keys
        except OSError as error:
            raise ConfigError(f"--output-filename must name a folder: {error}") from error
        os.environ[PREFIX] = TEMPLATE  # a line's rank is read from it
    elif not teed:
        os.environ.setdefault(PREFIX, TEMPLATE)
    template = os.environ.get(PREFIX) or TORCHS_TEMPLATE
    width, times = len(str(size - 1)), args.prefix_output_with_timestamp
    return whole_lines(template, args.role, folder=folder, width=width, times=times)
