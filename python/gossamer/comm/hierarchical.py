"""Sums by hosts: inside each host first, then across the slow hop between hosts.

Every local rank carries its part across, so all network cards work; then the parts are gathered inside the host. Only
what goes across is compressed. `connect_by_hosts` decides whether sums go by hosts; `Hierarchical` and `Flat` are what
a user says instead. Native: csrc/comm/by_hosts.h, csrc/route/.
"""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gossamer import _C
from gossamer._C import Communicator
from gossamer.comm.c10d import (
    from_group,
    gather_numbers,
    hosts_of,
    origin_of,
    origins,
    share_memory,
    split,
)
from gossamer.comm.host_memory import HostMemory, host_memory, why_through_host
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Hosts = list[list[int]]


@dataclass
class Hierarchical:
    """DataParallel(process_group=Hierarchical()): gradients are compressed between hosts, and exact inside one.

    Args:
        group: a process group, a communicator, or None for the default group.
        hosts: the ranks of each host. None: the ranks of one machine, network namespace and user are a host. Give it
            for other islands, such as racks.
    """

    group: "ProcessGroup | Communicator | None" = None
    hosts: Sequence[Sequence[int]] | None = None


@dataclass
class Flat:
    """DataParallel(process_group=Flat()): sums go between all ranks directly, also where ranks share hosts.

    Args:
        group: a process group, a communicator, or None for the default group.
    """

    group: "ProcessGroup | Communicator | None" = None


_log = logging.getLogger("gossamer")
_by_hosts: "WeakKeyDictionary[Communicator, dict[str, Communicator]]" = WeakKeyDictionary()
_ways: "WeakKeyDictionary[Communicator, str]" = WeakKeyDictionary()


def is_communicator(group: object) -> bool:
    """Returns whether it is a communicator, rather than a process group, a Hierarchical, a Flat or None."""
    return isinstance(group, _C.Communicator)


def given_group(group: Any) -> Any:
    """Returns the group inside a Hierarchical, Flat or HostMemory; of anything else, the argument itself."""
    return group.group if isinstance(group, (Hierarchical, Flat, HostMemory)) else group


def goes_by_hosts(hosts: Sequence[Sequence[int]]) -> bool:
    """Returns whether sums go by these hosts by default: there are at least two, and one has at least two ranks."""
    return len(hosts) > 1 and any(len(host) > 1 for host in hosts)


def connect_by_hosts(group: Any, comm: Communicator, control: Communicator) -> Communicator:
    """Returns `comm`, or a communicator around it whose sums go by hosts, or through memory of the host. Collective.

    Args:
        group: what the user gave. A Flat, Hierarchical or HostMemory decides; otherwise goes_by_hosts() does, and on
            one host why_through_host().
        comm: the ranks, for tensors on a model's device.
        control: the same ranks for CPU tensors; `comm` itself where that is on the CPU.
    """
    known = isinstance(comm, _C.ByHosts) or comm.shares_memory or comm.size == 1 or control not in origins
    if isinstance(group, Flat):
        way = "flat, as asked"
    elif isinstance(group, HostMemory):
        comm, way = host_memory(comm, control), "through host memory, as asked"
    elif known and not isinstance(group, Hierarchical):
        way = way_of(comm)
    else:
        hosts = hosts_of(control)
        if isinstance(group, Hierarchical):
            wanted = checked_hosts(group.hosts if group.hosts is not None else hosts, control)
            comm, way = by_hosts(comm, wanted, hosts), f"by hosts, as asked: {layout_text(wanted)}"
        elif goes_by_hosts(hosts):
            comm, way = by_hosts(comm, hosts, hosts), f"by hosts: {layout_text(hosts)}"
        elif len(hosts) == 1 and (reason := why_through_host(comm, control)):
            comm, way = host_memory(comm, control), f"through host memory: {reason}"
        else:
            way = f"flat: {layout_text(hosts)}"
    _ways[comm] = way
    if comm.rank == 0:
        _log.info("sums of %d ranks go %s", comm.size, way)
    return comm


def way_of(comm: Communicator) -> str:
    """Returns a text for people: whether its sums go by hosts, and why."""
    return _ways.get(comm, "flat: one rank" if comm.size == 1 else "flat")


def layout_text(hosts: Sequence[Sequence[int]]) -> str:
    """Returns a text such as "2 hosts x 4 ranks" or "2 hosts of 1 and 3 ranks"."""
    sizes = [len(host) for host in hosts]
    count = f"{len(sizes)} host{'s' if len(sizes) > 1 else ''}"
    if len(set(sizes)) == 1:
        return f"{count} x {sizes[0]} rank{'s' if sizes[0] > 1 else ''}"
    return f"{count} of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"


def hierarchy(comm: Communicator, hosts: Sequence[Sequence[int]] | None = None) -> Communicator:
    """Returns a communicator whose sums go by hosts, whatever the hosts are. Collective.

    `hosts`: the ranks of each host; None: the ranks of one machine are a host.
    """
    return connect_by_hosts(Hierarchical(comm, hosts), comm, comm)


def direct_group(group: Any, x: Tensor) -> Communicator:
    """Returns the communicator for gossamer.all_reduce(codec=...), by hosts as connect_by_hosts() decides.

    Collective the first time for a group, and the same object afterwards.
    """
    given = given_group(group)
    comm = given if is_communicator(given) else from_group(given, x.device)
    if isinstance(group, Flat) or (is_communicator(given) and group is given):
        return comm
    control = comm if comm.device.type == "cpu" else from_group(given, "cpu")
    known = _by_hosts.setdefault(comm, {})
    key = str(group.hosts) if isinstance(group, Hierarchical) else "default"
    if key not in known:
        known[key] = connect_by_hosts(group, comm, control)
    return known[key]


def duplicate(comm: Communicator) -> Communicator:
    """Makes new connections among the same ranks. Collective, as split()."""
    own = split(comm, range(comm.size))
    assert own is not None
    return hierarchy(own, comm.hosts) if isinstance(comm, _C.ByHosts) else own


def checked_hosts(hosts: Any, control: Communicator) -> Hosts:
    """Raises ConfigError unless every rank is in exactly one host, and all ranks say the same. Collective."""
    lists = [list(host) for host in hosts]
    if sorted(rank for host in lists for rank in host) != list(range(control.size)) or not all(lists):
        raise ConfigError(
            f"Hierarchical: hosts must name each of the ranks 0 to {control.size - 1} once, got {lists}"
        )
    every = gather_numbers(control, zlib.crc32(str(lists).encode()))
    different = [rank for rank, own in enumerate(every) if own != every[0]]
    if different:
        raise ConfigError(
            f"Hierarchical: hosts must be the same on all ranks; those of {different} differ from rank 0's"
        )
    return lists


def by_hosts(comm: Communicator, hosts: Hosts, machines: Hosts) -> Communicator:
    """Returns a communicator around `comm` whose sums go by hosts, or other islands. Collective.

    Args:
        comm: all ranks.
        hosts: the ranks of each host.
        machines: the ranks of each machine.
    """
    at = {rank: number for number, machine in enumerate(machines) for rank in machine}
    shared = comm.device.type == "cpu" and all(len({at[rank] for rank in host}) == 1 for host in hosts)
    parts = [split(comm, host, kind="gossamer" if shared else None) for host in hosts]
    inside = next(part for part in parts if part is not None)
    carriers = min(len(host) for host in hosts)
    kind = "gloo" if comm.device.type == "cpu" else None  # it sends rows in pieces where the link is slow
    across = [split(comm, [host[carrier] for host in hosts], kind=kind) for carrier in range(carriers)]
    if shared:
        inside = share_memory(inside, inside)
    if comm.device.type == "cpu":  # no rank may leave before all have connected
        comm.all_reduce(torch.zeros(1)).wait()
    own = _C.ByHosts(comm, inside, next((part for part in across if part is not None), None), hosts)
    origins[own] = origin_of(comm)
    return own
