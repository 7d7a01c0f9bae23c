"""``Session`` and ``start()``: joins the workers, opens the process sets, and leaves again.

basics.py keeps the session that is open, and answers from it.
"""

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gossamer import late_entry, membership, runtime
from gossamer.comm.named import NamedOptions, abort_all, open_named
from gossamer.horovod.common import environment, placement, process_sets
from gossamer.horovod.common.environment import Knobs
from gossamer.horovod.common.placement import Place
from gossamer.horovod.common.process_sets import ProcessSet, Table
from gossamer.horovod.common.timeline import Timeline

if TYPE_CHECKING:
    from gossamer import _C

_counts: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()  # how many sessions each default group has had


@dataclass
class Session:
    """What is fixed between init() and shutdown()."""

    knobs: Knobs
    place: Place
    table: Table
    timeline: Timeline | None  # on rank 0, if HOROVOD_TIMELINE is set
    process: int  # the process that called init(); a forked child has no session
    key: str  # equal on all ranks, different for each session: the beginning of its connections' keys
    expected: bool = (
        False  # a newcomer outside any group, with the place that it would have in the one that trains
    )

    def close(self) -> None:
        """Ends the operations of every set, and leaves the workers if init() joined them."""
        if self.expected:
            late_entry.on_need(None)
        try:
            self.table.close()
            process_sets.activate(None)
            if self.timeline is not None:
                self.timeline.stop()
        finally:
            if self.place.owns_group:
                runtime.shutdown()


def start(comm: Any, wanted: Any, backend: str | None) -> Session:
    """Does what init() says, with its arguments. Leaves nothing behind if it raises."""
    knobs = environment.read()
    if isinstance(wanted, str) and wanted != "dynamic":
        raise ValueError(f"hvd.init: process_sets must be a list of ProcessSet or 'dynamic', got {wanted!r}")
    given = [] if wanted is None or wanted == "dynamic" else list(wanted)
    static = [entry if isinstance(entry, ProcessSet) else ProcessSet(entry) for entry in given]

    def tell(mpi_world: Any) -> list[tuple[list[int] | None, bool]]:
        for entry in static:
            if entry.mpi_comm is not None:
                entry.ranks = process_sets.ranks_of_comm(entry.mpi_comm, mpi_world)
        return [(entry.ranks, entry.mpi_comm is not None) for entry in static]

    place = placement.join(comm, knobs, backend=_backend(knobs, backend), tell=tell)
    timeline = Timeline() if knobs.timeline is not None and place.rank == 0 else None
    group = dist.group.WORLD
    _counts[group] = count = _counts.get(group, 0) + 1
    key = f"horovod/{count}"

    def open_set(number: int, ranks: list[int]) -> "_C.NamedCollectives":
        options = NamedOptions(
            fusion_bytes=knobs.fusion_bytes,
            fuse_groups=knobs.fuse_groups,
            cache_capacity=knobs.cache_capacity,
            stall_warning_s=knobs.stall_warning_s,
            stall_shutdown_s=knobs.stall_shutdown_s,
            by_hosts=knobs.by_hosts,
            on_event=None if timeline is None else timeline.listener(number),
        )
        return open_named(None, ranks, key=f"{key}/{number}", options=options)

    dynamic = knobs.dynamic_process_sets or wanted == "dynamic"
    table = Table(place.rank, place.size, dynamic=dynamic, open_set=open_set, mpi_world=place.mpi_world)
    session = Session(knobs, place, table, timeline, os.getpid(), key)
    if (member := membership.member()) is not None:
        member.on_broken(abort_all)
    try:
        if knobs.log_level is not None:
            logging.getLogger("gossamer").setLevel(knobs.log_level)
        sets = _agreed_sets(place, static)
        process_sets.activate(table)
        table.start()
        for entry in sets:
            table.add(entry)
        if timeline is not None and knobs.timeline not in (None, "DYNAMIC"):
            timeline.start(str(knobs.timeline), mark_cycles=knobs.mark_cycles)
    except BaseException:
        session.close()
        raise
    return session


def expect(comm: Any, wanted: Any, backend: str | None) -> Session | None:
    """Returns a session for a newcomer of an elastic run whose group trains: it knows only ranks and sizes.

    Returns None where there is no such group, or where the arguments need the other ranks; start() is next then.
    """
    if comm is not None or (wanted and wanted != "dynamic"):
        return None
    knobs = environment.read()
    outlook = runtime.announce(_backend(knobs, backend))
    if outlook is None:
        return None
    place = placement.expected(outlook)
    dynamic = knobs.dynamic_process_sets or wanted == "dynamic"
    table = Table(place.rank, place.size, dynamic=dynamic, open_set=None, mpi_world=None)
    process_sets.activate(table)
    table.start()
    return Session(knobs, place, table, None, os.getpid(), "", expected=True)


def _agreed_sets(place: Place, static: list[ProcessSet]) -> list[ProcessSet]:
    """Returns the sets of all ranks in one order. The groups of one MPI_Comm_split are several sets at one place.

    Raises ValueError on all ranks if the ranks' sets differ in another way.
    """
    given = [[ranks for ranks, _ in told] for told in place.told]
    for rank, told in enumerate(place.told):
        splits = len(told) == len(static) and all(
            of_comm and rank in ranks
            for (ranks, of_comm), first in zip(told, given[0], strict=True)
            if ranks != first
        )
        if not splits:
            raise ValueError(
                f"hvd.init: process_sets must be equal on all ranks, got {given[0]} on rank 0 and {given[rank]} on "
                f"rank {rank}"
            )
    sets = []
    for entry, *alternatives in zip(static, *given, strict=True):
        for ranks in {tuple(ranks): ranks for ranks in alternatives}.values():
            sets.append(entry if ranks == entry.ranks else ProcessSet(ranks))
    return sets


def _backend(knobs: Knobs, backend: str | None) -> str | None:
    """Returns the backend for gossamer.init(). HOROVOD_CPU_OPERATIONS says nothing about GPUs or an existing group."""
    for part in backend.split(",") if backend else ():
        if part.split(":")[-1] not in dist.Backend.backend_list:
            raise ValueError(f"hvd.init: backend must be of {dist.Backend.backend_list}, got {backend!r}")
    if dist.is_initialized() or backend is not None:
        return backend
    if knobs.backend is not None and torch.cuda.is_available():
        return f"cpu:{knobs.backend},cuda:nccl"
    return knobs.backend
