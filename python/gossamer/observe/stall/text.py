"""The words of the stall watch and of the reports of named operations. Measures nothing and talks to nobody."""

import gc
import os
import socket
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gossamer import _C

SHOWN = 6  # lines of a list
_STACK = 12  # innermost calls of a thread
#: The folders of this package and torch. A user's project may lie below another folder of such a name.
PACKAGES = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))


def name_ranks(ranks: Collection[int]) -> str:
    """Return `rank 2` or `ranks 0, 1`; for many ranks the first ones and the number of the others."""
    shown = ", ".join(map(str, sorted(ranks)[: 2 * SHOWN]))
    more = f" and {len(ranks) - 2 * SHOWN} more" if len(ranks) > 2 * SHOWN else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def waiting_line(
    what: str, seconds: float, *, doing: str = "", here: Collection[int], missing: Collection[int]
) -> str:
    """Return the line of one wait, which has the same form in every report.

    Args:
        what: what the ranks wait for.
        here, missing: the ranks that have come, and those that have not.
    """
    come = f"; come: {name_ranks(here)}" if here else ""
    absent = f"; not come: {name_ranks(missing)}" if missing else ""
    what += f", {doing}" if doing else ""
    return f"{what}: waits for {seconds:.0f} s{come}{absent}"


def list_lines(lines: Sequence[str]) -> str:
    """Return the first lines indented, and the number of the others."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(f"  {line}" for line in [*lines[:SHOWN], *more])


def named_report(stalled: Iterable[_C.Stalled]) -> str:
    """Return the report of operations that some ranks have submitted and others have not."""
    lines = [
        waiting_line(
            one.name + (f" (submitted at {one.call_site})" if one.call_site else ""),
            one.seconds,
            here=one.submitted,
            missing=one.missing,
        )
        for one in stalled
    ]
    return (
        "gossamer: named operations wait for ranks that have not submitted them. Do all ranks run the same "
        f"operations, and are they alive?\n{list_lines(lines)}"
    )


def place_of(thread: int) -> str:
    """Return `file:line in function` of a thread's innermost call outside of this package and torch."""
    frame = _frame_of(thread)
    if frame is None:
        return "in no Python code"
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def stack_of(thread: int) -> str:
    """Return the innermost calls of a thread, as a traceback shows them."""
    frame = _frame_of(thread)
    if frame is None:
        return "  it runs no Python code"
    return "".join(traceback.format_stack(frame)[-_STACK:]).rstrip()


def _frame_of(thread: int) -> FrameType | None:
    # Before Python 3.12 a collection may begin inside _current_frames(), under the lock of the list of threads. A
    # finalizer that releases the GIL there, for a thread that ends, stops the process for good (CPython gh-106883).
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


@cache
def this_host() -> str:
    """Return a text that is equal for processes that see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def fate(rank: int, note: dict[str, Any], *, step: int) -> str:
    """Return one line of what a rank says about itself in its note, while another rank waits for it in `step`."""
    behind = step - int(note["step"])
    at = f"is at {note['unit']} {note['step']}" + (f", {behind} behind," if behind > 0 else "")
    if note["waits"]:
        what, _bucket, seconds, _doing = note["waits"][0]
        return f"rank {rank} {at} and waits itself, for {seconds:.0f} s: {what}"
    return f"rank {rank} {at} and in other code, at {note['at']}"


def silence(rank: int, note: dict[str, Any] | None, *, seconds: float, overdue: bool) -> str:
    """Return one line about a rank that does not answer.

    Args:
        note: its latest note, if it has ever written one.
        seconds: the time since it was asked.
        overdue: whether that is long.
    """
    here = note is not None and note["host"] == this_host()
    state = _process_state(note["pid"]) if note is not None and here else "?"
    if note is not None and state in ("", "Z", "X"):
        return f"rank {rank} has died; its process {note['pid']} is gone"
    if note is not None and state in ("T", "t"):
        return f"rank {rank} is stopped; its process {note['pid']} was sent SIGSTOP, or is in a debugger"
    if not overdue:
        return f"rank {rank} has not answered yet"
    silent = f"rank {rank} has not answered for {seconds:.0f} s; "
    if note is None or not here:
        return silent + "it has died or been stopped, or cannot reach the store"
    return (
        silent
        + f"its process {note['pid']} runs, but has closed this model, or something holds its interpreter"
    )


def _process_state(process: int) -> str:
    """Return the state letter of proc(5); empty if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
