"""``Table``: the process sets between an init() and its shutdown(), opened, numbered and closed alike on all ranks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common.exceptions import internal_errors
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set, ranks_of_comm

if TYPE_CHECKING:
    from gossamer import _C


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
