"""Where this worker stands: Bagua's helpers over gossamer.runtime.

Before the group is joined, the launcher's variables (torchrun, mpirun or srun) give the answers, as in Bagua.
Afterwards the group gives them. Without a launcher the process is alone.
"""

import socket
from collections.abc import Callable

from gossamer import config, runtime
from gossamer.config import Placement

get_default_bucket_size: Callable[[], int] = config.bagua_bucket_bytes
get_autotune: Callable[[], bool] = config.bagua_autotune
get_master_addr: Callable[[], str] = config.master_addr


def get_world_size() -> int:
    """Number of workers. ConfigError if the launcher's variables contradict each other; so for the others."""
    return runtime.size() if runtime.is_initialized() else _placement().size


def get_rank() -> int:
    """This worker's number among all, from 0."""
    return runtime.rank() if runtime.is_initialized() else _placement().rank


def get_local_rank() -> int:
    """This worker's number among those of its host, from 0."""
    return runtime.local_rank() if runtime.is_initialized() else _placement().local_rank


def get_local_size() -> int:
    """Number of workers of this host."""
    return runtime.local_size() if runtime.is_initialized() else _placement().local_size


def get_node_rank() -> int:
    """This host's number among the hosts, as the launcher counted them; 0 if none did."""
    return runtime.node_rank() if runtime.is_initialized() else config.node_rank()


def find_free_network_port() -> int:
    """A TCP port of this host that is free now. Nothing keeps it free until it is used."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _placement() -> Placement:
    return config.launcher_environment() or Placement("alone", 0, 1, 0, 1)
