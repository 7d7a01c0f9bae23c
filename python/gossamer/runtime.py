# This process among all workers: finds the launcher, joins torch.distributed, and answers rank() and size(). It has
# no transport and no rendezvous of its own. Users and the faces call it. The engine does not: it works on any process
# group.
"""Joining the group of workers: ``init()``, ``rank()``, ``size()``, ``shutdown()``."""

import gc
import logging
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from gossamer import config, late_entry, membership, mpi, waiting
from gossamer.config import Placement
from gossamer.errors import CommError, ConfigError
from gossamer.membership import Outlook


@dataclass(frozen=True)
class _Membership:
    place: Placement
    node_rank: int
    adopted: bool  # the caller made torch's default group, so shutdown() leaves it


_membership: _Membership | None = None
_expected: _Membership | None = None  # the place that a newcomer of an elastic run will have
_given: tuple[str | None, float] | None = None  # what init() was given, in an elastic run
_stores: dict[Placement, dist.Store] = {}
_has_gpu = False
_joins = 0  # times that this process has joined: each has keys of its own in a store that outlives the group


def init(backend: str | None = None, *, timeout_s: float | None = None) -> None:
    """Joins all workers of this run. Every worker calls it once, before anything else of Gossamer.

    The worker's place comes from the environment of ``gossamer run`` or torchrun, of mpirun (Open MPI, MPICH; the
    rendezvous goes through mpi4py) or of srun. Without any of them the process is alone, with size 1.
    If ``torch.distributed`` is initialised already, its default group is adopted as it is. In an elastic run
    init() waits for a place in the first group. Later, while others train, it returns at once: rank() and the like
    are then what they would be in the next group. The process enters it when gs.elastic() has copied the state of the
    training, or when something else needs the group first.

    ``backend``: a torch.distributed backend string; None is "gossamer", or "cpu:gossamer,cuda:nccl" where a
    GPU is visible, and then the GPU numbered ``local_rank`` becomes the current one.
    ``timeout_s``: seconds one collective may take; None is GOSSAMER_TIMEOUT_S, 1800 by default.

    Raises ConfigError: called twice, bad argument or environment, mpi4py missing, fewer GPUs than local
    workers, arguments given although a group was adopted. CommError: the others were not reached in time.
    """
    global _expected, _given
    if dist.is_initialized() or membership.member() is None:
        enter(backend, timeout_s=timeout_s)
        return
    _given = backend, _prepare("init", timeout_s)
    if (outlook := announce(backend)) is None:
        _take_place()
        return
    _expected = _Membership(outlook.placement, 0, adopted=False)
    late_entry.on_need(_take_place_late)


def enter(backend: str | None = None, *, timeout_s: float | None = None) -> None:
    """Does what init() does, and waits for the group in every case. For faces that let a newcomer in by themselves."""
    global _membership
    seconds = _prepare("init", timeout_s)
    if dist.is_initialized():
        if backend is not None or timeout_s is not None:
            raise ConfigError(
                "gossamer.init: torch.distributed is initialised already and its group is adopted as it is; "
                f"got backend={backend!r}, timeout_s={timeout_s}. Give them to init_process_group instead."
            )
        _membership = _adopt()
        return
    if (member := membership.member()) is not None:
        member.enter(lambda seat, store: _enter(seat.placement, backend, seconds, store, seat.node_rank))
        return
    placement = config.launcher_environment() or Placement("alone", 0, 1, 0, 1)
    _enter(placement, backend, seconds)


def _take_place() -> None:
    """Enters the next group of an elastic run, and waits for it."""
    member = membership.member()
    assert member is not None
    assert _given is not None
    backend, seconds = _given
    member.enter(lambda seat, store: _enter(seat.placement, backend, seconds, store, seat.node_rank))


def _take_place_late() -> bool:
    global _expected
    expected, _expected = _expected, None
    late_entry.on_need(None)
    _take_place()
    return _membership != expected


def renew() -> None:
    """Leaves the group of an elastic run, and enters the next one as init() did. Raises as init() does."""
    _leave(collect=False)
    _take_place()


def lost_place() -> bool:
    """Returns whether this process joined an elastic run by init() and its group has lost a member: renew() then."""
    member = _seated()
    return member is not None and member.lost_group()


def state_lives() -> bool:
    """Returns whether a member of this group holds the state of a training that newcomers take. Equal on all ranks.

    CommError: the group has lost a member before it said so.
    """
    member = _seated()
    return member is not None and bool(member.holders())


def give_place_up() -> bool:
    """Leaves a group of an elastic run that has failed although nobody is known to be dead: renew() then.

    The driver forms the next one of the members that come back. Returns False if this process has not joined an elastic
    run by init(), or has lost the driver.
    """
    member = _seated()
    if member is None or member.lost_driver:
        return False
    member.leave("error", skip_sync=False)
    return True


def _seated() -> membership.Member | None:
    """Returns this process as a worker of an elastic run that it joined by init(), once it is in a group."""
    member = membership.member()
    return member if member is not None and _given is not None and member.seat is not None else None


def join(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    local_size: int,
    local_rank: int | None = None,
    node_rank: int | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Joins as init() does, through a store, at a place that the caller gives.

    Without ``local_rank`` and ``node_rank``, ``local_size`` workers are on each host, with ranks in a row. The
    launcher's environment is not asked. Raises as init() does; ConfigError also if torch.distributed is
    initialised already.
    """
    seconds = _prepare("join", timeout_s)
    if not 0 <= rank < size or not 1 <= local_size <= size:
        raise ConfigError(
            f"gossamer.join: needs 0 <= rank < size and 1 <= local_size <= size, "
            f"got rank={rank}, size={size}, local_size={local_size}."
        )
    local_rank = rank % local_size if local_rank is None else local_rank
    node_rank = rank // local_size if node_rank is None else node_rank
    if dist.is_initialized():
        raise ConfigError(
            "gossamer.join: torch.distributed is initialised already; call gossamer.init(), which adopts its group."
        )
    _enter(Placement("store", rank, size, local_rank, local_size), backend, seconds, store, node_rank)


def announce(backend: str | None = None) -> Outlook | None:
    """Announces a newcomer of an elastic run, so that the others train on until it is ready. Faces call it.

    Returns the place that init() would give, while the group goes on without this worker; None if there is no such
    group, and init() is next. ``backend`` as for init(). Raises as it does.
    """
    if dist.is_initialized() or (member := membership.member()) is None:
        return None
    if (outlook := member.announce()) is not None:
        _choose(backend, outlook.placement)
    return outlook


def meet(timeout_s: float | None = None) -> tuple[Placement, dist.Store]:
    """Returns this worker's place and a store of all workers, for workers that will join() in smaller groups.

    Every worker must call it. ConfigError and CommError as init() does.
    """
    seconds = config.current().timeout_s if timeout_s is None else timeout_s
    placement = config.launcher_environment() or Placement("alone", 0, 1, 0, 1)
    try:
        return placement, _store_of(placement, seconds)
    except (RuntimeError, TimeoutError) as error:
        raise _not_joined("meet", placement, f"in {seconds:g} s: {error}") from error


def is_newcomer() -> bool:
    """Returns whether this process has come while others train, and is in no group with them yet."""
    return _expected is not None


def is_initialized() -> bool:
    """True between ``init()`` and ``shutdown()``."""
    return _expected is not None or (_membership is not None and dist.is_initialized())


def rank() -> int:
    """This worker's number, 0 to ``size() - 1``. ConfigError before ``init()``."""
    return _joined("rank").place.rank


def size() -> int:
    """Number of workers. ConfigError before ``init()``."""
    return _joined("size").place.size


def local_rank() -> int:
    """This worker's number among those on its host. ConfigError before ``init()``."""
    return _joined("local_rank").place.local_rank


def local_size() -> int:
    """Number of workers on this host. ConfigError before ``init()``."""
    return _joined("local_size").place.local_size


def node_rank() -> int:
    """Number of this worker's host among the hosts, 0 if no launcher counted them. ConfigError before ``init()``."""
    return _joined("node_rank").node_rank


def shutdown() -> None:
    """Leaves the group, after which ``init()`` may be called again. Does nothing before ``init()``.

    Destroys torch's default group if ``init()`` made it, and leaves an adopted one to its maker.
    """
    _leave(collect=True)


def _leave(*, collect: bool) -> None:
    """Does what shutdown() does. To collect garbage takes a tenth of a second or more, which others may wait for."""
    global _membership, _expected
    if _expected is not None:
        _expected = None
        late_entry.on_need(None)
    if _membership is not None and not _membership.adopted and dist.is_initialized():
        if (member := membership.member()) is not None and member.broken:
            membership.abort()  # others wait for connections to close, which the user's references keep open
        # A wrapper in a reference cycle holds its group, whose threads would outlive the interpreter.
        if collect:
            gc.collect()
        dist.destroy_process_group()
    _membership = None


def _joined(what: str) -> _Membership:
    if _expected is not None:
        return _expected
    late_entry.enter_now()
    if _membership is None or not dist.is_initialized():
        raise ConfigError(f"gossamer.{what}: needs the group of workers; call gossamer.init() first.")
    return _membership


def _prepare(what: str, timeout_s: float | None) -> float:
    """Checks that no group is joined yet, sets up the log, and returns the timeout in seconds."""
    late_entry.enter_now()
    if is_initialized():
        raise ConfigError(
            f"gossamer.{what}: must be called once, but this process is already "
            f"rank {rank()} of {size()}; ask gossamer.is_initialized(), or call gossamer.shutdown() first."
        )
    settings = config.current()
    log = logging.getLogger("gossamer")
    log.setLevel(settings.log_level.upper())
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"gossamer.{what}: timeout_s must be above 0, got {timeout_s}.")
    return settings.timeout_s if timeout_s is None else float(timeout_s)


def _enter(
    placement: Placement,
    backend: str | None,
    timeout_s: float,
    store: dist.Store | None = None,
    node: int | None = None,
) -> None:
    global _membership, _joins
    chosen = _choose(backend, placement)
    _joins += 1
    try:
        with waiting.told(placement, timeout_s):
            if store is None:
                # A store outlives the group, and still holds the addresses of the group before.
                store = dist.PrefixStore(f"gossamer/join{_joins}", _store_of(placement, timeout_s))
            if "nccl" in chosen:
                _require_own_gpu(store, placement)
            dist.init_process_group(
                chosen,
                rank=placement.rank,
                world_size=placement.size,
                timeout=timedelta(seconds=timeout_s),
                store=store,
            )
    except (RuntimeError, TimeoutError) as error:
        if not dist.is_initialized():
            # torch numbers groups. This one must count too, because on ranks that did not fail it has counted.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
        why = f"with backend {chosen!r} in {timeout_s:g} s: {error}"
        raise _not_joined("init", placement, why) from error
    _membership = _Membership(placement, config.node_rank() if node is None else node, adopted=False)


def _choose(backend: str | None, placement: Placement) -> str:
    """Returns the backend, and makes its GPU the current one. In an elastic run the GPU stays: it has the model."""
    global _has_gpu
    chosen = backend or ("cpu:gossamer,cuda:nccl" if torch.cuda.is_available() else "gossamer")
    if "nccl" in chosen and not (placement.source == "elastic" and _has_gpu):
        count = torch.cuda.device_count()
        index = 0 if count == 1 else placement.local_rank  # a launcher may show each worker its own GPU alone
        if index >= count:
            raise ConfigError(
                f"gossamer.init: rank {placement.rank}/{placement.size} is local worker {placement.local_rank} "
                f"of {placement.local_size}, but {count} GPU(s) are visible; NCCL needs one GPU per worker. "
                "Start fewer workers, or use gossamer.init(backend='gloo')."
            )
        torch.cuda.set_device(index)
        _has_gpu = True
    return chosen


def _require_own_gpu(store: dist.Store, placement: Placement) -> None:
    """Refuses workers that share a GPU. Collective over all workers. Indices do not show it, so UUIDs are compared."""
    own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store.set(f"gpu/{placement.rank}", own)
    if torch.cuda.device_count() > 1 or placement.local_size == 1:
        return  # the local rank is the index
    every = [store.get(f"gpu/{rank}").decode() for rank in range(placement.size)]
    shared = next((rank for rank, uuid in enumerate(every) if every.index(uuid) < rank), None)
    if shared is not None:
        raise ConfigError(
            f"gossamer.init: ranks {every.index(every[shared])} and {shared} of {placement.size} share "
            f"GPU-{every[shared]}; NCCL needs one GPU per worker. "
            "Start fewer workers, or use gossamer.init(backend='gloo')."
        )


def _not_joined(what: str, placement: Placement, why: str) -> CommError:
    where = f" at {placement.master_addr}:{placement.master_port}" if placement.master_addr else ""
    return CommError(
        f"gossamer.{what}: rank {placement.rank}/{placement.size} ({placement.source}) could not join{where} {why}"
    )


def _store_of(placement: Placement, timeout_s: float) -> dist.Store:
    """Returns a store through which workers meet. A store with an address is kept: it cannot be served twice."""
    if placement.source == "mpirun":
        return mpi.store_of(mpi.world_of(placement), timeout_s)
    if placement.master_addr is None:
        return dist.HashStore()
    if placement not in _stores:
        where = f"tcp://{placement.master_addr}:{placement.master_port}"
        # torchrun's agent may hold the store already.
        at: Any = ("env://",) if placement.source == "torchrun" else (where, placement.rank, placement.size)
        _stores[placement], _, _ = next(rendezvous(*at, timeout=timedelta(seconds=timeout_s)))
    return _stores[placement]


def _adopt() -> _Membership:
    own, count = dist.get_rank(), dist.get_world_size()
    placement = config.launcher_environment()
    if placement is None or (placement.rank, placement.size) != (own, count):
        hosts: list[Any] = [None] * count
        dist.all_gather_object(hosts, socket.gethostname())
        here = [peer for peer, host in enumerate(hosts) if host == hosts[own]]
        placement = Placement("torch", own, count, here.index(own), len(here))
    return _Membership(placement, config.node_rank(), adopted=True)
