"""Workers that mpirun started find each other over MPI, by mpi4py. Afterwards they communicate by torch.

runtime.py uses it, and the Horovod face for the communicators that scripts give.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossamer import stores
from gossamer.config import Placement
from gossamer.errors import ConfigError


def world_of(placement: Placement) -> Any:
    """Returns mpi4py's communicator of all workers.

    Raises:
        ConfigError: mpi4py is missing, or uses another MPI than mpirun.
    """
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
    return world


def store_of(comm: Any, timeout_s: float) -> dist.Store:
    """Returns a store that rank 0 of an mpi4py communicator serves on a free port. Collective."""
    one_host = len(set(comm.allgather(socket.gethostname()))) == 1
    address = "127.0.0.1" if one_host else socket.gethostname()
    timeout = timedelta(seconds=timeout_s)
    store = None
    if comm.rank == 0:
        store = stores.serve(address, world_size=comm.size, timeout=timeout, wait_for_workers=False)
    address, port = comm.bcast((address, store.port) if store else None, root=0)
    return store or dist.TCPStore(address, port, comm.size, False, timeout=timeout)
