"""Ranks of a host whose GPUs cannot read each other's memory: rows travel through memory of the host.

Every rank maps this memory for its GPU. `HostMemory` is what a user passes as process_group; `host_memory` makes the
communicator of the ranks of a host. connect_by_hosts() takes it by itself where the driver says that GPUs have no peer
access. Native: csrc/comm/symmetric.h, csrc/backend/peers.cpp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gossamer import _C
from gossamer._C import Communicator
from gossamer.comm.c10d import share_memory, split
from gossamer.comm.symmetric import MAX_RANKS, lost_between, missing_peer_access, require_one_host
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class HostMemory:
    """DataParallel(process_group=HostMemory()): sums go through memory of the host, without peer access between GPUs.

    With several hosts, they are exact inside each, and go between hosts through the codec, as with Hierarchical.

    Args:
        group: a process group, a communicator, or None for the default group. Everything but sums of buckets goes
            through it; a process group gets new connections of its kind for that.
        hosts: the ranks of each host. None: the ranks of one machine, network namespace and user are a host. Several
            may be on one machine.
    """

    group: "ProcessGroup | Communicator | None" = None
    hosts: Sequence[Sequence[int]] | None = None


def why_through_host(
    comm: Communicator, control: Communicator, called: Sequence[int] | None = None
) -> str | None:
    """Returns why sums should go through memory of the host; None if they should not. Collective if on CUDA.

    Args:
        comm: the ranks, all on one host, for tensors on the model's device.
        control: the same ranks for CPU tensors.
        called: the numbers by which the text calls the ranks; by default 0, 1, ...
    """
    if comm.device.type != "cuda" or not _C.with_cuda or not 1 < comm.size <= MAX_RANKS:
        return None
    index = comm.device.index
    return missing_peer_access(control, torch.cuda.current_device() if index is None else index, called)


def require_islands(hosts: Sequence[Sequence[int]], machines: Sequence[Sequence[int]]) -> None:
    """Raises ConfigError unless each host is on one machine and has at most MAX_RANKS ranks."""
    for host in hosts:
        if len(host) > MAX_RANKS:
            raise ConfigError(
                f"HostMemory: at most {MAX_RANKS} ranks can share memory, got {len(host)} on a host"
            )
        if not any(set(host) <= set(machine) for machine in machines):
            raise ConfigError(
                f"HostMemory: the ranks of a host must be on one machine, got hosts {[list(each) for each in hosts]} "
                f"on machines {[list(each) for each in machines]}"
            )


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
    require_one_host("HostMemory", control, "give its hosts")
    host = split(control, range(control.size), kind="gossamer")
    assert host is not None
    own = share_memory(comm, host, of_host=True)
    lost = lost_between(own, control)
    if lost is not None:
        raise ConfigError(
            f"HostMemory: values must arrive in memory of the host, but were lost between ranks {lost[0]} and "
            f"{lost[1]}; process_group=Flat() goes without it"
        )
    return own
