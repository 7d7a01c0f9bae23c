"""A group on one host whose GPUs cannot read each other's memory: rows travel through memory of the host.

Every rank maps this memory for its GPU. `HostMemory` is what a user passes as process_group; `host_memory` makes the
communicator of a model. connect_by_hosts() takes it by itself where the driver says that GPUs have no peer access.
Native: csrc/comm/symmetric.h, csrc/backend/peers.cpp.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gossamer import _C
from gossamer._C import Communicator
from gossamer.comm.c10d import share_host_memory, split
from gossamer.comm.symmetric import MAX_RANKS, lost_between, missing_peer_access, require_one_host
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class HostMemory:
    """DataParallel(process_group=HostMemory()): sums go through memory of the host, without peer access between GPUs.

    Args:
        group: a process group, a communicator, or None for the default group. Everything but sums of buckets goes
            through it; a process group gets new connections of its kind for that.
    """

    group: "ProcessGroup | Communicator | None" = None


def why_through_host(comm: Communicator, control: Communicator) -> str | None:
    """Returns why sums should go through memory of the host; None if they should not. Collective if on CUDA.

    Args:
        comm: the ranks, all on one host, for tensors on the model's device.
        control: the same ranks for CPU tensors.
    """
    if comm.device.type != "cuda" or not _C.with_cuda or not 1 < comm.size <= MAX_RANKS:
        return None
    index = comm.device.index
    return missing_peer_access(control, torch.cuda.current_device() if index is None else index)


def host_memory(comm: Communicator, control: Communicator) -> Communicator:
    """Returns a communicator whose sums go through memory of the host that all ranks read in place. Collective.

    Args:
        comm: the ranks, for tensors on the model's device.
        control: the same ranks for CPU tensors, made with a store; `comm` itself where that is on the CPU.

    Raises:
        ConfigError: on every rank, if the ranks are on several hosts or more than MAX_RANKS, or a value that one of
            them writes does not arrive. It names the first pair of ranks between whom a value was lost.
        CommError: on every rank, if a rank cannot get the memory or map it for its device.
    """
    if comm.size == 1:
        return comm
    require_one_host("HostMemory", control, "use Hierarchical")
    host = split(control, range(control.size), kind="gossamer")
    assert host is not None
    own = share_host_memory(comm, host)
    lost = lost_between(own, control)
    if lost is not None:
        raise ConfigError(
            f"HostMemory: values must arrive in memory of the host, but were lost between ranks {lost[0]} and "
            f"{lost[1]}; process_group=Flat() goes without it"
        )
    return own
