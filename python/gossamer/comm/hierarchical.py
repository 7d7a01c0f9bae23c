"""Sums by hosts: inside each host first, then across the slow hop between hosts.

Every local rank carries its part across, so all network cards work; then the parts are gathered inside the host. Only
what goes across is compressed. `connect_by_hosts` decides whether sums go by hosts, and whether they go through memory
of the host; `KINDS` are what a user says instead. Native: csrc/comm/by_hosts.h, csrc/route/.
"""

import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
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
from gossamer.comm.host_memory import HostMemory, host_memory, require_islands, why_through_host
from gossamer.comm.symmetric import Symmetric, symmetric
from gossamer.errors import CommError, ConfigError

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
        host_memory: whether sums may go through memory of the host, if all ranks are on one whose GPUs have no peer
            access. False: they go by the group's backend.
    """

    group: "ProcessGroup | Communicator | None" = None
    host_memory: bool = False


KINDS = (Flat, Hierarchical, HostMemory, Symmetric)
"""What says how sums travel, around a group. Each has the attribute `group`."""

GroupLike: TypeAlias = "ProcessGroup | Communicator | Flat | Hierarchical | HostMemory | Symmetric | None"
"""What a user gives as process_group. None is the default group."""

_log = logging.getLogger("gossamer")
_by_hosts: "WeakKeyDictionary[Communicator, dict[str, Communicator]]" = WeakKeyDictionary()
_ways: "WeakKeyDictionary[Communicator, str]" = WeakKeyDictionary()


def is_communicator(group: object) -> bool:
    """Returns whether it is a communicator, rather than a process group, one of KINDS or None."""
    return isinstance(group, _C.Communicator)


def given_group(group: Any) -> Any:
    """Returns the group inside one of KINDS; of anything else, the argument itself."""
    return group.group if isinstance(group, KINDS) else group


def is_default(group: Any) -> bool:
    """Returns whether what a user gave as process_group is the default group, or one of KINDS around it alone."""
    return given_group(group) is None and getattr(group, "hosts", None) is None


def goes_by_hosts(hosts: Sequence[Sequence[int]]) -> bool:
    """Returns whether sums go by these hosts by default: there are at least two, and one has at least two ranks."""
    return len(hosts) > 1 and any(len(host) > 1 for host in hosts)


def connect_by_hosts(
    group: Any, comm: Communicator, control: Communicator, *, overlap: bool = False
) -> Communicator:
    """Returns `comm`, or a communicator around it whose sums take another way, as KINDS say. Collective.

    Args:
        group: what the user gave. One of KINDS decides; otherwise goes_by_hosts() does, and on GPUs of one host
            why_through_host().
        comm: the ranks, for tensors on a model's device.
        control: the same ranks for CPU tensors; `comm` itself where that is on the CPU.
        overlap: whether the caller queues several sums that are on their way at the same time.
    """
    known = isinstance(comm, _C.ByHosts) or comm.shares_memory or comm.size == 1 or control not in origins
    one_level = isinstance(group, Flat)
    if isinstance(group, Flat) and not group.host_memory:
        way = "flat, as asked"
    elif isinstance(group, Symmetric):
        comm, way = symmetric(comm, control), "through symmetric memory, as asked"
    elif known and not isinstance(group, (Hierarchical, HostMemory)):
        way = way_of(comm)
    else:
        asked = isinstance(group, (Hierarchical, HostMemory))
        hosts = machines = hosts_of(control)
        if asked and group.hosts is not None:
            hosts = checked_hosts(group.hosts, control, type(group).__name__)
        layout = layout_text(hosts)
        if isinstance(group, HostMemory) and len(hosts) == 1:
            comm, way = host_memory(comm, control), "through host memory, as asked"
        elif isinstance(group, HostMemory):
            require_islands(hosts, machines)
            comm, _ = by_hosts(comm, control, hosts, machines, memory=True)
            way = f"by hosts, through host memory inside each, as asked: {layout}"
        elif asked or (goes_by_hosts(hosts) and not one_level):
            comm, reason = by_hosts(comm, control, hosts, machines, overlap=overlap)
            way = f"by hosts{', as asked' if asked else ''}: {layout}"
            way += f"; inside this host through host memory: {reason}" if reason else ""
        elif len(hosts) == 1 and (reason := why_through_host(comm, control)):
            comm, way = host_memory(comm, control), f"through host memory: {reason}"
        else:
            way = f"flat{', as asked' if one_level else ''}: {layout}"
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
    if (isinstance(group, Flat) and not group.host_memory) or (is_communicator(given) and group is given):
        return comm
    control = comm if comm.device.type == "cpu" else from_group(given, "cpu")
    known = _by_hosts.setdefault(comm, {})
    key = f"{type(group).__name__} {getattr(group, 'hosts', None)}" if isinstance(group, KINDS) else "default"
    if key not in known:
        known[key] = connect_by_hosts(group, comm, control)
    return known[key]


def duplicate(comm: Communicator) -> Communicator:
    """Makes new connections among the same ranks. Collective, as split()."""
    own = split(comm, range(comm.size))
    assert own is not None
    if not isinstance(comm, _C.ByHosts):
        return own
    on_cpu = own.device.type == "cpu"
    # What is agreed on the CPU costs no operation of NCCL, whose connections exist from the first one on.
    control = own if on_cpu else split(own, range(own.size), kind="gloo", device="cpu")
    assert control is not None
    return connect_by_hosts(Hierarchical(own, comm.hosts), own, control)


def checked_hosts(hosts: Any, control: Communicator, kind: str = "Hierarchical") -> Hosts:
    """Raises ConfigError unless every rank is in exactly one host, and all ranks say the same. Collective.

    `kind`: who has the hosts, for the error.
    """
    lists = [list(host) for host in hosts]
    if sorted(rank for host in lists for rank in host) != list(range(control.size)) or not all(lists):
        raise ConfigError(
            f"{kind}: hosts must name each of the ranks 0 to {control.size - 1} once, got {lists}"
        )
    every = gather_numbers(control, zlib.crc32(str(lists).encode()))
    different = [rank for rank, own in enumerate(every) if own != every[0]]
    if different:
        raise ConfigError(
            f"{kind}: hosts must be the same on all ranks; those of {different} differ from rank 0's"
        )
    return lists


def by_hosts(
    comm: Communicator,
    control: Communicator,
    hosts: Hosts,
    machines: Hosts,
    *,
    memory: bool = False,
    overlap: bool = False,
) -> tuple[Communicator, str | None]:
    """Returns a communicator around `comm` whose sums go by hosts, or other islands. Collective.

    Also returns why the ranks of this host sum through memory of the host by themselves; None if they do not.

    Args:
        comm: all ranks.
        control: the same ranks for CPU tensors.
        hosts: the ranks of each host.
        machines: the ranks of each machine.
        memory: whether the ranks of each host sum through its memory, as asked.
        overlap: as for connect_by_hosts().
    """
    at = {rank: number for number, machine in enumerate(machines) for rank in machine}
    near = all(len({at[rank] for rank in host}) == 1 for host in hosts)
    on_cpu = comm.device.type == "cpu"
    inside = _own_of(split(comm, host, kind="gossamer" if near and on_cpu else None) for host in hosts)
    assert inside is not None
    carriers = min(len(host) for host in hosts)
    kind = "gloo" if on_cpu else None  # it sends rows in pieces where the link is slow
    columns = [[host[carrier] for host in hosts] for carrier in range(carriers)]
    across = _own_of(split(comm, column, kind=kind) for column in columns)
    reason = None
    if near and (memory or not on_cpu):
        own = next(host for host in hosts if comm.rank in host)
        inside, reason = _through_memory(comm, control, inside, hosts, own, memory)
    elif near:
        inside = share_memory(inside, inside)
    if on_cpu:  # no rank may leave before all have connected
        comm.all_reduce(torch.zeros(1)).wait()
    back = None
    if overlap and comm.queues_on_device:  # also where memory serves this host, because splits are collective
        back = _own_of(split(comm, host) for host in hosts)
    made = _C.ByHosts(comm, inside, across, hosts, None if inside.shares_memory else back)
    origins[made] = origin_of(comm)
    return made, reason


def _own_of(splits: Iterable[Communicator | None]) -> Communicator | None:
    """Returns the one of these splits that this rank is in, or None. Makes all of them, because each is collective."""
    return next((part for part in [*splits] if part is not None), None)


def _through_memory(
    comm: Communicator, control: Communicator, inside: Communicator, hosts: Hosts, own: list[int], asked: bool
) -> tuple[Communicator, str | None]:
    """Returns `inside`, or the same ranks over memory of their host, and why. Collective over the ranks of all hosts.

    Each host decides by itself. If one fails, every rank raises.
    """
    problem, reason = None, None
    near = _own_of(split(comm, host, kind="gossamer", device="cpu") for host in hosts)
    assert near is not None
    try:
        reason = None if asked else why_through_host(inside, near, own)
        if asked or reason is not None:
            inside = host_memory(inside, near)
    except (ConfigError, CommError) as error:
        problem = error
    every = gather_numbers(control, int(problem is not None))
    if problem is not None:
        raise problem
    failed = [rank for rank, [lost] in enumerate(every) if lost]
    if failed:
        raise CommError(
            f"HostMemory: ranks {failed} cannot sum through memory of their host, as their errors say"
        )
    return inside, reason
