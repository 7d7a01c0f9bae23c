"""``ProcessSet``, ``add_process_set`` and ``remove_process_set``: some of the ranks, with operations of their own.

A session has one ``Table`` of sets. Their operations are native (comm/named.py opens them).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gossamer import late_entry
from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common.exceptions import HorovodInternalError, internal_errors

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

if TYPE_CHECKING:
    from gossamer import _C

_NOT_INITIALIZED = "hvd: Horovod has not been initialized; call hvd.init() first"


class ProcessSet:
    """Some of the ranks. The set works once init() or add_process_set() has registered it.

    ``ranks``: in ascending order. ``process_set_id``: None while the set is not registered; 0 is the set of all ranks.

    Args:
        ranks_or_comm: the ranks, or an mpi4py communicator of them. Raises ValueError for a rank that is negative, not
            an integer, or given twice.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None
    collectives: "_C.NamedCollectives | None" = None  # the native object, on members of a registered set

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_size"):
            self.mpi_comm = ranks_or_comm
            return
        self.ranks = checked_ranks(ranks_or_comm)

    def size(self) -> int | None:
        """Returns the number of ranks; None while the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns this process's number within the set; None while it is not registered.

        Raises ValueError if this process is no member.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        own = _table().rank
        if own not in self.ranks:
            raise ValueError(f"hvd.ProcessSet.rank: rank {own} must be a member, got {self}")
        return self.ranks.index(own)

    def included(self) -> bool | None:
        """Returns whether this process is a member; None while the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else _table().rank in self.ranks

    def native(self) -> "_C.NamedCollectives":
        """Returns the native object that runs the set's operations.

        Raises:
            HorovodInternalError: before init().
            ValueError: the set is not registered, or this process is no member.
        """
        if self.collectives is None:
            late_entry.enter_now()
        if self.collectives is not None:
            return self.collectives
        if _active is None:
            raise HorovodInternalError(_NOT_INITIALIZED)
        if self.process_set_id is None:
            raise ValueError(
                f"hvd: the process set must be registered, got {self}; use hvd.add_process_set() or init(process_sets=)"
            )
        raise ValueError(f"hvd: rank {_active.rank} must be a member of the process set, got {self}")

    def root(self, root_rank: int) -> int:
        """Returns a global rank's number within the set. Raises ValueError if that rank is no member."""
        if self.ranks is None or root_rank not in self.ranks:
            raise ValueError(
                f"root_rank must be one of the ranks {self.ranks} of the process set, got {root_rank}"
            )
        return self.ranks.index(root_rank)

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )


def checked_ranks(ranks: Iterable[int]) -> list[int]:
    """Returns the ranks in ascending order. Raises ValueError for one that is negative, no integer, or given twice."""
    given = list(ranks)
    if any(isinstance(rank, bool) or not hasattr(rank, "__index__") for rank in given):
        raise ValueError(f"hvd.ProcessSet: ranks must be integers, got {given}")
    ordered = sorted(int(rank) for rank in given)
    if len(set(ordered)) != len(ordered) or any(rank < 0 for rank in ordered):
        raise ValueError(f"hvd.ProcessSet: ranks must be different ones from 0, got {given}")
    return ordered


global_process_set: ProcessSet = ProcessSet([])
"""The process set of all ranks. Operations use it unless they are given another."""
global_process_set.process_set_id, global_process_set.ranks = 0, None


def ranks_of_comm(comm: Any, world: Any) -> list[int]:
    """Returns the global ranks of an mpi4py communicator. Raises ValueError if the workers did not meet over MPI."""
    if world is None:
        raise ValueError("hvd.ProcessSet: an MPI communicator needs workers that mpirun started")
    group = comm.Get_group()
    return checked_ranks(group.Translate_ranks(list(range(group.size)), world.Get_group()))


class Table:
    """The process sets of one session.

    Args:
        dynamic: whether sets may be added after init().
        open_set: opens the operations of a set, by its number and ranks. None: the sets cannot communicate.
        mpi_world: mpi4py's communicator of all workers, or None.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        dynamic: bool,
        open_set: "Callable[[int, list[int]], _C.NamedCollectives] | None",
        mpi_world: Any,
    ) -> None:
        self.rank = rank
        self.size = size
        self.dynamic = dynamic
        self._open_set = open_set
        self._mpi_world = mpi_world
        self.sets: dict[int, ProcessSet] = {}

    def start(self) -> None:
        """Opens the set of all ranks."""
        global_process_set.ranks = list(range(self.size))
        self._register(global_process_set, 0)

    def add(self, process_set: ProcessSet) -> None:
        """Opens a set. Collective over all ranks.

        Raises:
            ValueError: on all ranks, if there is a set of these ranks already, or the ranks' calls differ.
        """
        ranks = self._ranks_of(process_set)
        number = _all_agree("add_process_set", ranks)
        process_set.ranks = ranks
        self._register(process_set, number)

    def remove(self, process_set: ProcessSet) -> bool:
        """Closes a set, and returns whether this table has it. Collective over all ranks. Raises as add()."""
        number = process_set.process_set_id
        if number in (None, 0) or self.sets.get(number) is not process_set:
            return False
        _all_agree("remove_process_set", number)
        self._forget(process_set)
        return True

    def close(self) -> None:
        """Ends the operations of every set, the latest set first."""
        for process_set in reversed(list(self.sets.values())):
            self._forget(process_set)

    def _register(self, process_set: ProcessSet, number: int) -> None:
        assert process_set.ranks is not None
        if self.rank in process_set.ranks and self._open_set is not None:
            process_set.collectives = self._open_set(number, process_set.ranks)
        process_set.process_set_id = number
        self.sets[number] = process_set

    def _forget(self, process_set: ProcessSet) -> None:
        collectives, process_set.collectives = process_set.collectives, None
        number, process_set.process_set_id = process_set.process_set_id, None
        if process_set is global_process_set:
            process_set.process_set_id, process_set.ranks = 0, None
        assert number is not None
        del self.sets[number]
        if collectives is not None:
            collectives.shutdown()

    def _ranks_of(self, process_set: ProcessSet) -> list[int]:
        if process_set.mpi_comm is not None:
            process_set.ranks = ranks_of_comm(process_set.mpi_comm, self._mpi_world)
        ranks = process_set.ranks or []
        if not ranks or ranks[-1] >= self.size:
            raise ValueError(f"hvd.add_process_set: ranks must be some of 0 to {self.size - 1}, got {ranks}")
        for other in self.sets.values():
            if other.ranks == ranks:
                raise ValueError(f"hvd.add_process_set: a set of these ranks is there already: {other}")
        return ranks


def _all_agree(what: str, argument: Any) -> int:
    """Negotiates `what` between all ranks, and returns the number of the set."""
    try:
        with internal_errors(CommError):
            operation = getattr(global_process_set.native(), what)(argument)
            operation.wait()
    except ConfigError as error:
        raise ValueError(f"hvd.{what}: {error}") from error
    return int(operation.value)


_active: Table | None = None


def activate(table: Table | None) -> None:
    """Makes `table` the one that add_process_set() adds to. session.py calls it."""
    global _active
    _active = table


def _table() -> Table:
    if _active is None:
        raise ValueError(_NOT_INITIALIZED)
    return _active


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers and returns a set that init() did not know. Every rank must call it, members or not.

    Raises:
        ValueError: neither HOROVOD_DYNAMIC_PROCESS_SETS=1 nor init(process_sets="dynamic") was given, these ranks have
            a set already, or ranks give different sets.
    """
    table = _dynamic("add_process_set")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    table.add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a set. Every rank must call it. Returns False, without effect, if it is not registered or has all ranks."""
    return _dynamic("remove_process_set").remove(process_set)


def _dynamic(what: str) -> Table:
    late_entry.enter_now()
    table = _table()
    if not table.dynamic:
        raise ValueError(
            f"hvd.{what}: needs HOROVOD_DYNAMIC_PROCESS_SETS=1 at hvd.init(), or hvd.init(process_sets='dynamic')"
        )
    return table
