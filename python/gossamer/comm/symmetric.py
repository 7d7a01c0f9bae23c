"""A group on one host whose ranks read each other's buckets in place: torch's symmetric memory on GPUs.

`Symmetric` is what a user passes as process_group; `symmetric` makes the communicator of a model. Sums and compressed
sums of buckets are then Gossamer's own two-shot, in rank order, without NCCL. Everything else still goes through the
group's own backend. Native: csrc/comm/symmetric.cpp.
"""

import os
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import torch

from gossamer import _C, config
from gossamer._C import Communicator
from gossamer.comm.c10d import gather_numbers, hosts_of, share_memory
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_RANKS = 72  # as torch's; the kernels take as many addresses
"""The largest number of ranks that can read each other's memory in place."""
_UUID_SHIFTS = (96, 64, 32, 0)  # a UUID travels as four numbers of 32 bits


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
        ConfigError: on every rank, if the ranks cannot share memory, or are more than MAX_RANKS. It names the first
            pair of ranks whose GPUs do not reach each other.
    """
    if comm.size == 1:
        return comm
    require_one_host("Symmetric", control, "Hierarchical compresses between them")
    if comm.device.type != "cuda":
        return share_memory(comm, control)
    _require_that_ranks_see_each_other(control)
    index = comm.device.index
    require_peer_access(control, torch.cuda.current_device() if index is None else index)
    own = share_memory(comm, control)
    require_that_memory_arrives(own, control)
    return own


def require_one_host(name: str, control: Communicator, otherwise: str) -> None:
    """Raises ConfigError unless the ranks are on one host, and at most MAX_RANKS. Collective.

    Args:
        name: whose ranks they are, for the error.
        control: the ranks, for CPU tensors.
        otherwise: what to do for several hosts.
    """
    if control.size > MAX_RANKS:
        raise ConfigError(f"{name}: at most {MAX_RANKS} ranks can share memory, got {control.size}")
    hosts = hosts_of(control)
    if len(hosts) > 1:
        raise ConfigError(f"{name}: all ranks must be on one host, got {hosts}; for several, {otherwise}")


def require_that_memory_arrives(own: Communicator, control: Communicator) -> None:
    """Lets each rank write into the memory of all ranks and read from it, and checks the values. Collective.

    With an IOMMU or PCIe's access control, the driver may allow access, and what is written never arrives.

    Args:
        own: a communicator over symmetric memory.
        control: the same ranks for CPU tensors.

    Raises:
        ConfigError: on every rank. It names the first pair of ranks between whom a value was lost.
    """
    lost = lost_between(own, control)
    if lost is not None:
        raise ConfigError(
            f"Symmetric: values must arrive in the memory of other ranks' devices, but were lost between ranks "
            f"{lost[0]} and {lost[1]}; turn off the IOMMU or PCIe's access control services (ACS), or use HostMemory, "
            f"NCCL or Gloo"
        )


def lost_between(own: Communicator, control: Communicator) -> tuple[int, int] | None:
    """Lets each rank write into the memory of all ranks and read from it. Collective.

    Returns the first pair of ranks between whom a value was lost, the same on every rank; None if all arrived.
    """
    broken = set(_C.unreached_peers(own))
    every = gather_numbers(control, *(int(peer in broken) for peer in range(own.size)))
    return next(((rank, row.index(1)) for rank, row in enumerate(every) if any(row)), None)


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


def visible_uuids() -> list[str]:
    """Returns the UUIDs of the GPUs that this process sees, by index."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def can_access(index: int, peer: int) -> bool:
    """Whether one visible GPU can access the memory of another one."""
    return index == peer or torch.cuda.can_device_access_peer(index, peer)


def require_peer_access(control: Communicator, index: int) -> None:
    """Checks that each rank has a GPU of its own, which can access the GPUs of all ranks. Collective.

    GPUs are compared by UUID. Where each rank sees one GPU alone, as with Slurm's --gpus-per-task, all have index 0.
    The driver is not asked about GPUs that a process does not see.

    Args:
        control: the ranks, for CPU tensors.
        index: the GPU of this rank.

    Raises:
        ConfigError: on every rank. It names the first pair of ranks that share a GPU, or whose GPUs cannot access each
            other's memory.
    """
    indices, uuids = _gpus_of(control, index)
    shared = next((pair for pair in _pairs(control.size) if uuids[pair[0]] == uuids[pair[1]]), None)
    if shared is not None and not config.allows_equal_gpu_indices():
        raise ConfigError(
            f"Symmetric: each rank must have a GPU of its own, but ranks {shared[0]} and {shared[1]} share "
            f"GPU-{uuids[shared[0]]}; start one rank for each GPU, or for a test set "
            f"{config.EQUAL_GPU_INDICES}=1"
        )
    apart = _missing_access(control, index, uuids)
    if apart is not None:
        raise ConfigError(
            f"Symmetric: GPUs must access each other's memory, but {apart}; see `nvidia-smi topo -p2p r`, or use "
            f"HostMemory, NCCL or Gloo"
        )
    if len(set(indices)) < control.size:
        config.allow_equal_gpu_indices()


def missing_peer_access(control: Communicator, index: int, called: Sequence[int] | None = None) -> str | None:
    """Returns which GPU cannot access the memory of which other one, or None if all can. Collective.

    All ranks get the same answer. GPUs that a rank does not see count as accessible: the driver cannot be asked.

    Args:
        control: the ranks, for CPU tensors.
        index: the GPU of this rank.
        called: the numbers by which the text calls the ranks; by default 0, 1, ...
    """
    return _missing_access(control, index, _gpus_of(control, index)[1], called)


def _gpus_of(control: Communicator, index: int) -> tuple[list[int], list[str]]:
    """Returns the index and the UUID of each rank's GPU. Collective."""
    own = UUID(visible_uuids()[index]).int
    rows = gather_numbers(control, index, *[own >> shift & 0xFFFFFFFF for shift in _UUID_SHIFTS])
    uuids = [
        str(UUID(int=sum(part << at for part, at in zip(row[1:], _UUID_SHIFTS, strict=True)))) for row in rows
    ]
    return [row[0] for row in rows], uuids


def _missing_access(
    control: Communicator, index: int, uuids: list[str], called: Sequence[int] | None = None
) -> str | None:
    visible = visible_uuids()
    reached = [each not in visible or can_access(index, visible.index(each)) for each in uuids]
    reach = gather_numbers(control, *map(int, reached))
    apart = next((pair for pair in _pairs(control.size) if not reach[pair[0]][pair[1]]), None)
    if apart is None:
        return None
    names = range(control.size) if called is None else called
    rank, peer = (f"the GPU of rank {names[each]} (GPU-{uuids[each]})" for each in apart)
    return f"{rank} cannot access {peer}"


def _pairs(size: int) -> list[tuple[int, int]]:
    return [(rank, peer) for rank in range(size) for peer in range(size) if rank != peer]
