# Where this process stands among all workers: finds the launcher, joins torch.distributed, answers
# rank() and size(). Re-implements no transport and no rendezvous. The engine does not use it: it works
# on any process group; users and the faces call it.
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

from gossamer import config
from gossamer.config import Placement
from gossamer.errors import CommError, ConfigError


@dataclass(frozen=True)
class _Membership:
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    adopted: bool  # the caller made torch's default group; shutdown() leaves it alone


_membership: _Membership | None = None
_joins = 0  # of this process, so that each gets keys of its own in a store that outlives the group


def init(backend: str | None = None, *, timeout_s: float | None = None) -> None:
    """Joins all workers of this run; every worker calls it once, before anything else of Gossamer.

    The place is found from the environment of ``gossamer run``/torchrun, of mpirun (Open MPI, MPICH; the
    rendezvous goes through mpi4py) or of srun; without any of them the process is alone, with size 1.
    If ``torch.distributed`` is initialised already, its default group is adopted as it is.

    ``backend``: a torch.distributed backend string; None is "gossamer", or "cpu:gossamer,cuda:nccl" where a
    GPU is visible, and then the GPU numbered ``local_rank`` becomes the current one.
    ``timeout_s``: seconds one collective may take; None is GOSSAMER_TIMEOUT_S, 1800 by default.

    Raises ConfigError: called twice, bad argument or environment, mpi4py missing, fewer GPUs than local
    workers, arguments given although a group was adopted. CommError: the others were not reached in time.
    """
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
    placement = config.launcher_environment() or Placement("alone", 0, 1, 0, 1)
    _enter(placement, backend, seconds, None)


def join(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    local_size: int,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """init() for workers that found each other by themselves: through a store, at places that the caller gives.

    ``local_size`` workers are on each host, with ranks in a row. The launcher's environment is not asked.
    Raises as init() does; ConfigError also if torch.distributed is initialised already.
    """
    seconds = _prepare("join", timeout_s)
    if not 0 <= rank < size or not 1 <= local_size <= size:
        raise ConfigError(
            f"gossamer.join: needs 0 <= rank < size and 1 <= local_size <= size, "
            f"got rank={rank}, size={size}, local_size={local_size}."
        )
    if dist.is_initialized():
        raise ConfigError(
            "gossamer.join: torch.distributed is initialised already; call gossamer.init(), which adopts its group."
        )
    _enter(Placement("store", rank, size, rank % local_size, local_size), backend, seconds, store)


def is_initialized() -> bool:
    """True between ``init()`` and ``shutdown()``."""
    return _membership is not None and dist.is_initialized()


def rank() -> int:
    """This worker's number, 0 to ``size() - 1``. ConfigError before ``init()``."""
    return _joined("rank").rank


def size() -> int:
    """Number of workers. ConfigError before ``init()``."""
    return _joined("size").size


def local_rank() -> int:
    """This worker's number among those on its host. ConfigError before ``init()``."""
    return _joined("local_rank").local_rank


def local_size() -> int:
    """Number of workers on this host. ConfigError before ``init()``."""
    return _joined("local_size").local_size


def node_rank() -> int:
    """Number of this worker's host among the hosts, 0 where no launcher counted them. ConfigError before ``init()``."""
    return _joined("node_rank").node_rank


def shutdown() -> None:
    """Leaves the group; ``init()`` may be called again. Does nothing if not initialised.

    Destroys torch's default group if ``init()`` made it, and leaves an adopted one to its maker.
    """
    global _membership
    if _membership is not None and not _membership.adopted and dist.is_initialized():
        gc.collect()  # a wrapper in a reference cycle holds its group, whose threads would outlive the interpreter
        dist.destroy_process_group()
    _membership = None


def _joined(what: str) -> _Membership:
    if _membership is None or not dist.is_initialized():
        raise ConfigError(f"gossamer.{what}: needs the group of workers; call gossamer.init() first.")
    return _membership


def _prepare(what: str, timeout_s: float | None) -> float:
    """What comes before joining: one group at a time, the log; returns the timeout in seconds."""
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


def _enter(placement: Placement, backend: str | None, timeout_s: float, store: dist.Store | None) -> None:
    global _membership
    chosen = backend or ("cpu:gossamer,cuda:nccl" if torch.cuda.is_available() else "gossamer")
    if "nccl" in chosen:
        _take_gpu(placement)
    _join(placement, chosen, timeout_s, store)
    local = placement.local_rank, placement.local_size
    node = config.node_rank() if store is None else placement.rank // placement.local_size
    _membership = _Membership(placement.rank, placement.size, *local, node_rank=node, adopted=False)


def _take_gpu(placement: Placement) -> None:
    count = torch.cuda.device_count()
    if placement.local_rank >= count:
        raise ConfigError(
            f"gossamer.init: rank {placement.rank}/{placement.size} is local worker {placement.local_rank} "
            f"of {placement.local_size}, but {count} GPU(s) are visible; NCCL needs one GPU per worker. "
            "Start fewer workers, or use gossamer.init(backend='gloo')."
        )
    torch.cuda.set_device(placement.local_rank)


def _join(placement: Placement, backend: str, timeout_s: float, store: dist.Store | None) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "rank": placement.rank,
        "world_size": placement.size,
        "timeout": timedelta(seconds=timeout_s),
    }
    global _joins
    _joins += 1
    try:
        options |= _rendezvous(placement, timeout_s) if store is None else {"store": store}
        dist.init_process_group(**options)
    except (RuntimeError, TimeoutError) as error:
        where = f" at {placement.master_addr}:{placement.master_port}" if placement.master_addr else ""
        raise CommError(
            f"gossamer.init: rank {placement.rank}/{placement.size} ({placement.source}) could not join"
            f"{where} with backend {backend!r} in {timeout_s:g} s: {error}"
        ) from error


def _rendezvous(placement: Placement, timeout_s: float) -> dict[str, Any]:
    """The arguments of init_process_group that let the workers find each other."""
    if placement.source == "torchrun" and _joins == 1:
        return {"init_method": "env://"}  # torchrun's agent may hold the store already
    if placement.source == "torchrun":
        # The agent's store still holds the addresses of the group before, which a fast rank would find.
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        return {"store": dist.PrefixStore(f"gossamer/join{_joins}", store)}
    if placement.source == "srun":
        return {"init_method": f"tcp://{placement.master_addr}:{placement.master_port}"}
    if placement.source == "mpirun":
        return {"store": _mpi_store(placement, timeout_s)}
    return {"store": dist.HashStore()}


def _mpi_store(placement: Placement, timeout_s: float) -> dist.Store:
    """Rank 0 serves a store on a free port and broadcasts its address over MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigError(
            f"gossamer.init: mpirun started this worker, and the rendezvous needs mpi4py ({error}); "
            "run `pip install mpi4py`, or start with `gossamer run`."
        ) from error
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (placement.rank, placement.size):
        raise ConfigError(
            f"gossamer.init: mpirun says rank {placement.rank} of {placement.size}, but mpi4py says "
            f"{world.rank} of {world.size}: it uses another MPI than this mpirun. Set MPI4PY_MPIABI to "
            "openmpi or mpich, or build mpi4py from source."
        )
    one_host = len(set(world.allgather(socket.gethostname()))) == 1
    address = "127.0.0.1" if one_host else socket.gethostname()
    timeout = timedelta(seconds=timeout_s)
    store = None
    if world.rank == 0:
        store = dist.TCPStore(address, 0, world.size, True, timeout=timeout, wait_for_workers=False)
    address, port = world.bcast((address, store.port) if store else None, root=0)
    return store or dist.TCPStore(address, port, world.size, False, timeout=timeout)


def _adopt() -> _Membership:
    own, count = dist.get_rank(), dist.get_world_size()
    placement = config.launcher_environment()
    if placement is not None and (placement.rank, placement.size) == (own, count):
        local = placement.local_rank, placement.local_size
        return _Membership(own, count, *local, node_rank=config.node_rank(), adopted=True)
    hosts: list[Any] = [None] * count
    dist.all_gather_object(hosts, socket.gethostname())
    here = [peer for peer, host in enumerate(hosts) if host == hosts[own]]
    return _Membership(own, count, here.index(own), len(here), node_rank=config.node_rank(), adopted=True)
