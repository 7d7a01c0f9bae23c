# init() to shutdown(): who takes part, with which settings, and the process sets they have. One session at a time, any
# number of them one after the other. Operations on tensors are in gossamer.horovod.torch.
"""Horovod's ``init``, ``shutdown``, the rank and size family, and the timeline."""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gossamer import late_entry, membership, runtime
from gossamer.errors import CommError
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.common.session import Session, expect, start
from gossamer.observe.stall import Limits

_log = logging.getLogger("gossamer")
_session: Session | None = None
_lock = threading.RLock()
_at_exit = False
_at_shutdown: list[Callable[[], None]] = []


def init(
    comm: Any = None,
    process_sets: str | Sequence[ProcessSet | Sequence[int]] | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Joins all workers, and registers process sets; every worker calls it. Does nothing while it holds already.

    ``comm``: None for all workers that the launcher started; a list of their ranks, with this process's own, for
    those alone, numbered in that order (workers in other lists form other groups); or an mpi4py communicator.
    ``process_sets``: a list of ProcessSet, equal on all ranks, or "dynamic" to allow add_process_set().
    ``backend``: torch.distributed's name; None is HOROVOD_CPU_OPERATIONS, or "gossamer" ("cpu:gossamer,cuda:nccl" with
    a GPU). A group that gossamer.init() or torch.distributed has made is taken as it is.

    A newcomer to an elastic run whose group trains is told the ranks and sizes that it would have in it, and returns.
    It enters the group, and waits until the others let it in, at its first collective or in the function that
    elastic.run decorates. With ``comm`` or a list of process sets it waits here.

    Reads the HOROVOD_* variables now. ValueError: a variable or an argument that cannot work, ranks that give different
    sets, workers that could not be reached.
    """
    global _session, _at_exit
    with _lock:
        if _session is not None and _session.process == os.getpid():
            return
        _session = _opened(lambda: expect(comm, process_sets, backend) or start(comm, process_sets, backend))
        if _session.expected:
            late_entry.on_need(lambda: _enter(comm, process_sets, backend))
        if not _at_exit:
            atexit.register(shutdown)
            _at_exit = True


def _enter(*arguments: Any) -> bool:
    """A newcomer waits for its place in the group. Whether it is another than init() has told."""
    global _session
    with _lock:
        told = _session
        if told is None or not told.expected or told.process != os.getpid():
            return False
        shutdown()
        _session = _opened(lambda: start(*arguments))
        before, now = told.place.numbers(), _session.place.numbers()
        if now != before:
            _log.info(
                "hvd.init told (rank, size, local and cross) %s; the group has changed since: %s", before, now
            )
        return now != before


def _opened(begin: Callable[[], Session]) -> Session:
    while True:
        try:
            return begin()
        except RuntimeError as error:
            if (member := membership.member()) is not None and member.lost_group():
                runtime.shutdown()  # and once more, in the next group of an elastic run
            elif isinstance(error, CommError):
                raise ValueError(f"hvd.init: {error}") from error
            else:
                raise


def shutdown() -> None:
    """Ends the operations of all ranks, what waits fails, and leaves the workers. init() may be called again."""
    global _session
    with _lock:
        ended, _session = _session, None
        if ended is None or ended.process != os.getpid():
            return
        try:
            for reset in _at_shutdown:
                reset()
        finally:
            ended.close()


def at_shutdown(reset: Callable[[], None]) -> Callable[[], None]:
    """Decorator of what the faces of frameworks put back in shutdown(), before the process sets end."""
    _at_shutdown.append(reset)
    return reset


def is_initialized() -> bool:
    """True between ``init()`` and ``shutdown()``."""
    return _session is not None and _session.process == os.getpid()


def _now(what: str) -> Session:
    if _session is None or _session.process != os.getpid():
        raise ValueError(f"hvd.{what}: Horovod has not been initialized; call hvd.init() first")
    return _session


def rank() -> int:
    """This process's number among all. ValueError before ``init()``, as the others below."""
    return _now("rank").place.rank


def size() -> int:
    """Number of processes."""
    return _now("size").place.size


def local_rank() -> int:
    """This process's number among those on its host."""
    return _now("local_rank").place.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return _now("local_size").place.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank."""
    return _now("cross_rank").place.cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank."""
    return _now("cross_size").place.cross_size


def session_key() -> str:
    """Of this session, equal on all ranks, never used before: the beginning of keys of connections. As ``rank()``."""
    return _now("session_key").key


def stall_limits() -> Limits:
    """When waits of this session are told of and end, in seconds. As ``rank()``."""
    knobs = _now("stall_limits").knobs
    return Limits(knobs.stall_warning_s, knobs.stall_shutdown_s)


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return _now("is_homogeneous").place.homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Rank 0 writes a Chrome trace of negotiation and execution to the file from now on; the other ranks nothing.

    Ends one that is being written. ValueError before ``init()``, and if HOROVOD_TIMELINE was not set at ``init()``
    (to a file, or to DYNAMIC).
    """
    session = _timeline_session("start_timeline")
    if session.timeline is not None:
        session.timeline.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Finishes the file. ValueError as ``start_timeline()``."""
    session = _timeline_session("stop_timeline")
    if session.timeline is not None:
        session.timeline.stop()


def _timeline_session(what: str) -> Session:
    session = _now(what)
    if session.knobs.timeline is None:
        raise ValueError(f"hvd.{what}: HOROVOD_TIMELINE must be set at hvd.init(), to a file or to DYNAMIC")
    return session
