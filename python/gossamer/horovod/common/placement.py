"""``Place``: this process's rank and size among all, on its host and across hosts; and joining the workers.

The workers join through gossamer.runtime, as init(comm=...) says. Then each tells the others which host it is on.
"""

import json
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from gossamer import config, mpi, runtime
from gossamer.errors import ConfigError
from gossamer.horovod.common.environment import Knobs
from gossamer.membership import Outlook

_meetings: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class Place:
    """A process's numbers as Horovod counts: the cross family is over the hosts that have this local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool
    owns_group: bool  # init() joined the workers, so shutdown() leaves them
    mpi_world: Any = None  # mpi4py's communicator of all workers
    told: tuple[Any, ...] = ()  # what each rank told the others in join(), by rank

    def numbers(self) -> tuple[int, ...]:
        """Returns rank and size, and the local and the cross family."""
        local = self.local_rank, self.local_size, self.cross_rank, self.cross_size
        return self.rank, self.size, *local


def join(comm: Any, knobs: Knobs, *, backend: str | None, tell: Callable[[Any], Any]) -> Place:
    """Joins the workers, or takes the group that exists. Every rank's ``tell(mpi_world)`` becomes ``Place.told``."""
    owns = not runtime.is_initialized()
    mpi_world = comm if owns and hasattr(comm, "Get_size") else None
    if not owns:
        if comm is not None and (hasattr(comm, "Get_size") or list(comm) != list(range(runtime.size()))):
            raise ConfigError(
                f"hvd.init: the workers have been joined already; comm must be None or all their ranks, got {comm!r}"
            )
    elif comm is None:
        runtime.enter(backend, timeout_s=None if dist.is_initialized() else knobs.timeout_s)
    elif mpi_world is not None:
        seconds = config.current().timeout_s if knobs.timeout_s is None else knobs.timeout_s
        hosts = comm.allgather(_host())
        _join_hosts(hosts, comm.rank, mpi.store_of(comm, seconds), knobs=knobs, backend=backend)
    else:
        _join_ranks(list(comm), knobs, backend)
    try:
        if mpi_world is None and config.launched_by() == "mpirun":
            from mpi4py import MPI  # installed, because the workers have met over it

            mpi_world = MPI.COMM_WORLD
        return _place(knobs, owns=owns, mpi_world=mpi_world, tell=tell(mpi_world))
    except BaseException:
        if owns:
            runtime.shutdown()
        raise


def expected(outlook: Outlook) -> Place:
    """Returns the place that a newcomer would have in the group that trains."""
    own = outlook.placement
    return Place(own.rank, own.size, *_within_and_across(own.rank, outlook.locals), owns_group=False)


def _join_ranks(ranks: Sequence[int], knobs: Knobs, backend: str | None) -> None:
    """Joins those workers alone, numbered in that order. Other workers may form other groups."""
    world, store = runtime.meet(knobs.timeout_s)
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < world.size for rank in ranks):
        raise ConfigError(
            f"hvd.init: comm must be different ranks of 0 to {world.size - 1}, got {list(ranks)}"
        )
    if world.rank not in ranks:
        raise ConfigError(
            f"hvd.init: comm must hold this process's own rank {world.rank}, got {list(ranks)}; "
            "a process that takes no part does not call init()"
        )
    key = tuple(ranks)
    _meetings[key] += 1
    own = dist.PrefixStore(f"gossamer/ranks/{'-'.join(map(str, ranks))}/{_meetings[key]}", store)
    rank = ranks.index(world.rank)
    own.set(f"host{rank}", json.dumps(_host()))
    hosts = [tuple(json.loads(own.get(f"host{peer}"))) for peer in range(len(ranks))]
    _join_hosts(hosts, rank, own, knobs=knobs, backend=backend)


def _join_hosts(
    hosts: Sequence[Any], rank: int, store: dist.Store, *, knobs: Knobs, backend: str | None
) -> None:
    here = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    runtime.join(
        store,
        rank=rank,
        size=len(hosts),
        local_rank=here.index(rank),
        local_size=len(here),
        node_rank=list(dict.fromkeys(hosts)).index(hosts[rank]),
        backend=backend,
        timeout_s=knobs.timeout_s,
    )


def _host() -> tuple[int, str]:
    return config.node_rank(), socket.gethostname()


def _place(knobs: Knobs, *, owns: bool, mpi_world: Any, tell: Any) -> Place:
    rank, size = runtime.rank(), runtime.size()
    mine = (runtime.local_rank(), runtime.local_size()), tell
    everyone: list[Any] = [mine] * size
    if size > 1:
        dist.all_gather_object(everyone, mine)
    locals_, told = zip(*everyone, strict=True)
    place = Place(rank, size, *_within_and_across(rank, locals_), owns, mpi_world, told=told)
    outside = config.variables("HOROVOD_")
    launched_as = outside.get("HOROVOD_RANK"), outside.get("HOROVOD_SIZE")
    if knobs.cross is None or launched_as != (str(rank), str(size)):
        return place  # no launcher gave cross numbers, or they belong to an earlier group of this process
    return replace(place, cross_rank=knobs.cross[0], cross_size=knobs.cross[1])


def _within_and_across(rank: int, locals_: Sequence[tuple[int, int]]) -> tuple[int, int, int, int, bool]:
    """Returns the local and the cross family, and whether hosts have equally many ranks.

    Args:
        locals_: local rank and local size of each rank.
    """
    local_rank, local_size = locals_[rank]
    across = [other for other, (other_local_rank, _) in enumerate(locals_) if other_local_rank == local_rank]
    homogeneous = len({size for _, size in locals_}) == 1
    return local_rank, local_size, across.index(rank), len(across), homogeneous
