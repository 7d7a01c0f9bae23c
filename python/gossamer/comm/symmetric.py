"""A group on one host whose ranks read each other's buckets in place: torch's symmetric memory on GPUs.

`Symmetric` is what a user passes as process_group; `symmetric` makes the communicator of a model. Sums and compressed
sums of buckets are then Gossamer's own two-shot, in rank order, without NCCL. Everything else still goes through the
group's own backend. Native: csrc/comm/symmetric.cpp.
"""

import os
import tempfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gossamer._C import Communicator
from gossamer.comm.c10d import gather_numbers, hosts_of, share_memory
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_RANKS = 72  # as torch's; the kernels take as many addresses
"""The largest number of ranks that can read each other's memory in place."""


@dataclass
class Symmetric:
    """DataParallel(process_group=Symmetric()): the ranks share one host and read each other's buckets in place.

    Args:
        group: a process group, a communicator of CPU tensors, or None for the default group. Everything but sums of
            buckets goes through it; a process group gets new connections of its kind for that.
    """

    group: "ProcessGroup | Communicator | None" = None


def symmetric(comm: Communicator, control: Communicator) -> Communicator:
    """Returns a communicator over symmetric memory. All ranks read in place the memory that it allocates. Collective.

    Args:
        comm: the ranks, for tensors on the model's device. On the CPU it must use the backend "gossamer".
        control: the same ranks for CPU tensors; `comm` itself where that is on the CPU.

    Raises:
        ConfigError: on every rank, if the ranks cannot share memory, or are more than MAX_RANKS.
    """
    if comm.size == 1:
        return comm
    if comm.size > MAX_RANKS:
        raise ConfigError(f"Symmetric: at most {MAX_RANKS} ranks can share memory, got {comm.size}")
    hosts = hosts_of(control)
    if len(hosts) > 1:
        raise ConfigError(
            f"Symmetric: all ranks must be on one host, got {hosts}; for several, Hierarchical compresses between them"
        )
    if comm.device.type == "cuda":
        _require_that_ranks_see_each_other(control)
    return share_memory(comm, control)


def _require_that_ranks_see_each_other(control: Communicator) -> None:
    """Raises ConfigError unless ranks can open each other's sockets, through which torch passes memory descriptors.

    The sockets lie in the temporary folder and are named by process id.
    """
    where = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")] + [tempfile.gettempdir()]
    every = gather_numbers(control, zlib.crc32(str(where).encode()), os.getpid())
    places, processes = zip(*every, strict=True)
    different = [rank for rank, place in enumerate(places) if place != places[0]]
    if different:
        raise ConfigError(
            f"Symmetric: ranks must share process ids, mounts and the temporary folder; {different} differ from "
            f"rank 0, and this rank has {where}"
        )
    if len(set(processes)) < control.size:
        raise ConfigError(
            f"Symmetric: each rank must be a process of its own on a GPU, got process ids {list(processes)}"
        )
