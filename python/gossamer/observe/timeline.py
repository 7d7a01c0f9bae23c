"""The timeline: rank 0 merges the native recorder's spans of all ranks into one Chrome trace on one clock.

The program starts it, or GOSSAMER_TIMELINE does when the first model is wrapped. It ends by stop_timeline(), or with
the process.
"""

import atexit
import logging
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gossamer import _C, config
from gossamer.errors import ConfigError
from gossamer.observe import clocks
from gossamer.observe.trace_file import TraceFile
from gossamer.torch_private import default_store

CAPACITY = 1 << 17  # events of a rank, about 100 bytes each
TIMEOUT_S = 30.0
AT_EXIT_S = 10.0

_log = logging.getLogger("gossamer")


class _Event(NamedTuple):
    name: str
    category: str
    thread: int  # 0: the program; else the number of a worker
    instant: bool
    bucket: int
    step: int
    bytes: int
    begin_ns: int
    end_ns: int


class _Running:
    """A timeline that is being recorded."""

    def __init__(self, path: str | Path, capacity: int) -> None:
        self.path = Path(path).absolute()
        self.group = _group()
        if self.group is None or self.group.rank == 0:
            try:
                self.path.open("a").close()
            except OSError as error:
                raise ConfigError(
                    f"start_timeline: the timeline must be a file that can be written, got {self.path}: {error}"
                ) from error
        self.started_unix_s, self.started_ns = time.time(), _C.now_ns()
        self._steps: dict[int, int] = {}  # the start of each step, by the id of the optimizer
        self._hooks = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ended),
        ]
        _C.start_trace(capacity)

    def end(self) -> dict[str, Any]:
        """Stop recording, and return this rank's part."""
        events, replaced = _C.stop_trace()
        for hook in self._hooks:
            hook.remove()
        self.group = _group() or self.group
        return {"host": socket.gethostname(), "replaced": replaced, "events": events}

    def _step_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps[id(optimizer)] = _C.now_ns()

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        began = self._steps.pop(id(optimizer), None)
        if began is not None:
            _C.add_span(f"optimizer {type(optimizer).__name__}", began, -1)


_running: _Running | None = None
_ended = 0  # timelines so far; each has its own keys in the store
_from_environment = False


def start_timeline(path: str | Path, *, capacity: int = CAPACITY) -> None:
    """Begin to record what Gossamer does on this rank. Call it on every rank. Sends nothing.

    Args:
        path: the file that stop_timeline() writes on rank 0, a Chrome trace in JSON.
        capacity: the number of events to keep, about 100 bytes each. A new event then replaces the oldest.

    Raises:
        ConfigError: A timeline is being recorded already, or rank 0 cannot write the file.
    """
    global _running
    if _running is not None:
        raise ConfigError(
            f"start_timeline: a timeline is being recorded already, for {_running.path}; call gs.stop_timeline() first"
        )
    if capacity < 1:
        raise ConfigError(f"start_timeline: capacity must be at least 1 event, got {capacity}")
    _running = _Running(path, capacity)


def stop_timeline(*, timeout_s: float = TIMEOUT_S) -> Path | None:
    """End the timeline; rank 0 writes the events of all ranks. Call it on every rank.

    Rank 0 waits for the other ranks for at most `timeout_s` seconds. The file names the ranks that did not come, and is
    written without them. A rank that gets no answer from rank 0 writes its own events to a file with its number in the
    name.

    Returns:
        The file that this rank wrote; None if rank 0 has this rank's events, or no timeline was recorded.
    """
    global _running, _ended
    running, _running = _running, None
    if running is None:
        return None
    part = running.end()
    _ended += 1
    key = f"gossamer/timeline/{_ended}"
    group = running.group or clocks.TraceGroup(None, 0, 1)
    if group.rank != 0:
        if clocks.hand_over(group, key, part, _C.now_ns, 2 * timeout_s):
            return None
        path = running.path.with_suffix(f".rank{group.rank}{running.path.suffix}")
        _log.warning("stop_timeline: rank 0 does not answer rank %d, which writes %s", group.rank, path)
        return _write(path, running, {group.rank: part}, group.size)
    others = clocks.collect(group, key, _C.now_ns, timeout_s) if group.size > 1 else {}
    return _write(running.path, running, {0: part, **others}, group.size)


def begin_from_environment() -> None:
    """Start the timeline that GOSSAMER_TIMELINE asks for, once in a process. Called when a model is wrapped."""
    global _from_environment
    path = config.current().timeline
    if _running is not None:
        # The group may be gone when the timeline ends, but its store still answers.
        _running.group = _group() or _running.group
    elif path is not None and not _from_environment:
        _from_environment = True
        start_timeline(path)


@atexit.register
def _end_with_the_process() -> None:
    # Registered before the engine's handler, and so called after it, when workers have ended.
    try:
        stop_timeline(timeout_s=AT_EXIT_S)
    except Exception:
        _log.exception("gossamer: the timeline could not be written")


def _group() -> clocks.TraceGroup | None:
    """Return the ranks of torch's default group; None if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return clocks.TraceGroup(default_store(), dist.get_rank(), dist.get_world_size())


def _write(path: Path, running: _Running, parts: dict[int, dict[str, Any]], size: int) -> Path:
    """Merge the parts into a file. Its times are microseconds since the start on the rank that writes it."""
    ranks = {str(rank): _about(part) for rank, part in sorted(parts.items())}
    missing = [rank for rank in range(size) if rank not in parts]
    if missing:
        _log.warning("stop_timeline: nothing came from the ranks %s; %s is without them", missing, path)
    head = {"ranks": ranks, "missing_ranks": missing, "size": size, "start_unix_s": running.started_unix_s}
    file = TraceFile(path, head)
    for rank, part in sorted(parts.items()):
        offset_ns = part.get("clock", {}).get("offset_ns", 0) - running.started_ns
        _write_rank(file, rank, part, offset_ns)
    file.close()
    return path


def _about(part: dict[str, Any]) -> dict[str, Any]:
    about = {"host": part["host"], "events": len(part["events"]), "replaced_events": part["replaced"]}
    for name in ("clock", "measured"):
        clock = part.get(name, {"offset_ns": 0, "uncertainty_ns": 0})
        about |= {f"{name}_{key.removesuffix('_ns')}_us": value / 1e3 for key, value in clock.items()}
    return about


def _write_rank(file: TraceFile, rank: int, part: dict[str, Any], offset_ns: int) -> None:
    file.event("process_name", "M", pid=rank, args={"name": f"rank {rank} on {part['host']}"})
    file.event("process_sort_index", "M", pid=rank, args={"sort_index": rank})
    events = [_Event(*each) for each in part["events"]]
    workers = sorted({event.thread for event in events if event.thread})
    names = {0: "main"} | {thread: f"worker {thread}" if len(workers) > 1 else "worker" for thread in workers}
    for thread, name in names.items():
        file.event("thread_name", "M", pid=rank, tid=thread, args={"name": name})
    for event in events:
        args = {"bucket": event.bucket, "step": event.step, "bytes": event.bytes}
        known = {key: value for key, value in args.items() if value > 0 or (value == 0 and key != "bytes")}
        fields: dict[str, Any] = {"ph": "X", "dur": (event.end_ns - event.begin_ns) / 1e3}
        if event.instant:
            fields = {"ph": "i", "s": "t"}
        fields |= {"tid": event.thread, "ts_us": (event.begin_ns + offset_ns) / 1e3}
        file.event(event.name, pid=rank, cat=event.category, args=known, **fields)
