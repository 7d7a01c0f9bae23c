# Which process sets one session has: opens, numbers and closes them, on all ranks alike. session.py makes the table;
# scripts reach it through process_sets.py.
"""``Table``: the process sets between an init() and its shutdown()."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set, ranks_of_comm

if TYPE_CHECKING:
    from gossamer import _C


class Table:
    """The process sets of one init(). Without `open_set` they cannot communicate."""

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
        """Collective over all ranks. ValueError, on all ranks, for a set that is there already, or differing calls."""
        ranks = self._ranks_of(process_set)
        collectives = global_process_set.native()
        try:
            operation = collectives.add_process_set(ranks)
            operation.wait()
        except ConfigError as error:
            raise ValueError(f"hvd.add_process_set: {error}") from error
        except CommError as error:
            raise HorovodInternalError(str(error)) from error
        process_set.ranks = ranks
        self._register(process_set, operation.value)

    def remove(self, process_set: ProcessSet) -> bool:
        number = process_set.process_set_id
        if number in (None, 0) or self.sets.get(number) is not process_set:
            return False
        try:
            global_process_set.native().remove_process_set(number).wait()
        except ConfigError as error:
            raise ValueError(f"hvd.remove_process_set: {error}") from error
        except CommError as error:
            raise HorovodInternalError(str(error)) from error
        self._forget(process_set)
        return True

    def close(self) -> None:
        """Ends the operations of every set; the later ones first."""
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
