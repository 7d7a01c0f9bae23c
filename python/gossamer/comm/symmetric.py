"""A group on one host whose ranks read each other's buckets in place: torch's symmetric memory on GPUs.

`Symmetric` is what a user passes as process_group; `symmetric` makes the communicator that a model then gets. Sums
and compressed sums of buckets are then our own two-shot, in rank order, without NCCL; everything else still goes
through the group's own backend. Native: csrc/comm/symmetric.cpp.
"""

import os
import tempfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gossamer._C import Communicator
from gossamer.comm.c10d import hosts_of, share_memory
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_RANKS = 72  # as torch's; the kernels take as many addresses
"""The largest number of ranks that can read each other's memory in place."""


@dataclass
class Symmetric:
    """DataParallel(process_group=Symmetric()): the ranks share one host and read each other's buckets in place.

    Args:
        group: a process group, a communicator of CPU tensors, or None for the default group. What is no sum of buckets
            goes through it, or for a process group through new connections of its kind.
    """

    group: "ProcessGroup | Communicator | None" = None


def symmetric(comm: Communicator, control: Communicator) -> Communicator:
    """The communicator over symmetric memory: what it allocates is read in place by all ranks. Collective.

    Args:
        comm: the ranks, for tensors on the model's device. On the CPU it must be over the backend "gossamer".
        control: the same ranks for CPU tensors; `comm` itself where that is on the CPU.

    Raises:
        ConfigError: on every rank: ranks on several hosts, or in containers that hide them from each other; too many.
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
    """torch passes descriptors of memory through sockets in the temporary folder that are named by process id."""
    where = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")] + [tempfile.gettempdir()]
    mine = torch.tensor([zlib.crc32(str(where).encode()), os.getpid()])
    every = mine.new_empty(control.size, 2)
    control.all_gather(every.view(-1), mine).wait()
    places, processes = every.T.tolist()
    different = [rank for rank, place in enumerate(places) if place != places[0]]
    if different:
        raise ConfigError(
            f"Symmetric: ranks must share process ids, mounts and the temporary folder; {different} differ from "
            f"rank 0, and this rank has {where}"
        )
    if len(set(processes)) < control.size:
        raise ConfigError(
            f"Symmetric: each rank must be a process of its own on a GPU, got process ids {processes}"
        )
