"""``init``, ``shutdown``, the rank and size family, and the timeline.

One session is open at a time; any number may follow each other. session.py opens them. Operations on tensors are in
horovod/torch.
"""

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
from gossamer.horovod.common.timeline import Timeline

__all__ = ["init", "is_homogeneous", "is_initialized", "shutdown"]
__all__ += ["cross_rank", "cross_size", "local_rank", "local_size", "rank", "size"]
__all__ += ["start_timeline", "stop_timeline"]

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
    """Joins all workers, and registers process sets. Every worker calls it; a second call does nothing.

    The HOROVOD_* variables are read now. A group that gossamer.init() or torch.distributed has made is taken as it is.

    A newcomer to an elastic run whose group is training returns at once, with the ranks and sizes that it would have
    in the group. It enters the group, and waits until the others let it in, at its first collective or in the function
    that elastic.run decorates. With ``comm`` or a list of process sets the newcomer waits here.

    Args:
        comm: None for all workers that the launcher started. A list of their ranks, this process's among them, for
            those workers alone, numbered in that order; workers in other lists form other groups. Or an mpi4py
            communicator.
        process_sets: a list of ProcessSet, equal on all ranks, or "dynamic" to allow add_process_set().
        backend: torch.distributed's name. None is HOROVOD_CPU_OPERATIONS, or "gossamer" ("cpu:gossamer,cuda:nccl" with
            a GPU).

    Raises:
        ValueError: a variable or an argument cannot work, ranks give different sets, or workers were not reached.
    """
    global _session, _at_exit
    with _lock:
        if is_initialized():
            return
        _session = _opened(lambda: expect(comm, process_sets, backend) or start(comm, process_sets, backend))
        if _session.expected:
            late_entry.on_need(lambda: _enter(comm, process_sets, backend))
        if not _at_exit:
            atexit.register(shutdown)
            _at_exit = True


def _enter(*arguments: Any) -> bool:
    """Lets a newcomer wait for its place in the group. Returns whether the place differs from init()'s."""
    global _session
    with _lock:
        if _session is None or not is_initialized() or not _session.expected:
            return False
        before = _session.place.numbers()
        shutdown()
        _session = _opened(lambda: start(*arguments))
        if (now := _session.place.numbers()) == before:
            return False
        _log.info("hvd.init gave (rank, size, local, cross) %s; the group has changed since: %s", before, now)
        return True


def _opened(begin: Callable[[], Session]) -> Session:
    while True:
        try:
            return begin()
        except RuntimeError as error:
            if (member := membership.member()) is not None and member.lost_group():
                runtime.shutdown()  # then begin again, in the next group of an elastic run
            elif isinstance(error, CommError):
                raise ValueError(f"hvd.init: {error}") from error
            else:
                raise


def shutdown() -> None:
    """Ends the operations of all ranks, with an error for those in flight, and leaves the workers.

    init() may be called again afterwards.
    """
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
    """Decorator of a function that shutdown() calls before the process sets end."""
    _at_shutdown.append(reset)
    return reset


def is_initialized() -> bool:
    """Returns whether ``init()`` has been called, and no ``shutdown()`` since."""
    return _session is not None and _session.process == os.getpid()


def session_of(what: str) -> Session:
    """Returns the session that is open. Raises ValueError, which names `what`, before ``init()``."""
    if _session is None or not is_initialized():
        raise ValueError(f"hvd.{what}: Horovod has not been initialized; call hvd.init() first")
    return _session


def rank() -> int:
    """Returns this process's number among all. Raises ValueError before ``init()``, as do the functions below."""
    return session_of("rank").place.rank


def size() -> int:
    """Returns the number of processes."""
    return session_of("size").place.size


def local_rank() -> int:
    """Returns this process's number among those on its host."""
    return session_of("local_rank").place.local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return session_of("local_size").place.local_size


def cross_rank() -> int:
    """Returns this host's number among the hosts that have this local rank."""
    return session_of("cross_rank").place.cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have this local rank."""
    return session_of("cross_size").place.cross_size


def is_homogeneous() -> bool:
    """Returns whether every host has the same number of processes."""
    return session_of("is_homogeneous").place.homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begins a Chrome trace of negotiation and execution, which rank 0 writes. A trace that is being written ends.

    Raises:
        ValueError: before ``init()``; or HOROVOD_TIMELINE was not set at ``init()``, to a file or to DYNAMIC.
    """
    if (timeline := _timeline("start_timeline")) is not None:
        timeline.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Finishes the file. Raises ValueError as ``start_timeline()``."""
    if (timeline := _timeline("stop_timeline")) is not None:
        timeline.stop()


def _timeline(what: str) -> Timeline | None:
    session = session_of(what)
    if session.knobs.timeline is None:
        raise ValueError(f"hvd.{what}: HOROVOD_TIMELINE must be set at hvd.init(), to a file or to DYNAMIC")
    return session.timeline
