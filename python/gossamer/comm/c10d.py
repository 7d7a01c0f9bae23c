"""Communicators over torch.distributed's process groups. No other file looks inside process groups.

A model gets private connections between the ranks of the user's group, so that its traffic never interleaves with the
user's own collectives. Direct calls (gossamer.collectives) use the group that they are given.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gossamer import _C, late_entry, membership
from gossamer._C import Communicator
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class Origin:
    """What a communicator was made of. Another communicator can be made from it."""

    kind: str
    store: Any
    name: str
    timeout: timedelta
    splits: int = 0


#: Of the communicators that were made with a store, by which their ranks can meet for further connections.
origins: "WeakKeyDictionary[Communicator, Origin]" = WeakKeyDictionary()
_private_counts: "WeakKeyDictionary[ProcessGroup, int]" = WeakKeyDictionary()
# The keys are device types and the requested devices: to look up a device's type is slow beside a small message.
_Communicators = dict["str | torch.device", Communicator]
_communicators: "WeakKeyDictionary[ProcessGroup, _Communicators]" = WeakKeyDictionary()


def from_backend(
    backend: Any,
    *,
    device: torch.device | str = "cpu",
    store: Any = None,
    name: str = "backend",
    called: Sequence[int] = (),
) -> Communicator:
    """A communicator over one c10d backend object, such as a ProcessGroupGloo. No default group is needed.

    Args:
        backend: the c10d backend of this rank.
        device: where its tensors live.
        store: a c10d store, by which the ranks learn of failures; None if there is none.
        name: equal on all ranks of this group, and different for two groups that share a store.
        called: the numbers by which errors call its ranks, as members of a larger group; by default 0, 1, ...

    Raises:
        ConfigError: the backend is another one of torch's over NCCL than "nccl".
    """
    if own_kind(backend.name()) != backend.name():
        raise ConfigError(
            f"comm: from_backend takes torch's backend nccl over NCCL, got {backend.name()!r}; give the process group, "
            f"whose ranks then get connections over nccl"
        )
    comm = _C.c10d_communicator(backend, torch.device(device), store, name, list(called))
    if store is not None:
        kind = "gossamer" if isinstance(backend, _C.GossamerBackend) else backend.name()
        origins[comm] = origin = Origin(kind, store, name, _timeout_of(backend))
        if membership.member() is not None:
            comm.wait_on_host(origin.timeout)  # a member may die
    return comm


def connect_pair(store: Any, rank: int, *, name: str, connect_s: float, timeout_s: float) -> Communicator:
    """Makes connections between two processes that need not be in one group, for CPU tensors over Gloo. Collective.

    Args:
        store: both meet in it.
        rank: 0 or 1.
        name: as for from_backend().
        connect_s: seconds in which the other process must come.
        timeout_s: seconds that one collective may take afterwards.

    Raises:
        RuntimeError: the other process has not come in time.
    """
    backend = make_backend("gloo", store, rank, 2, timedelta(seconds=connect_s))
    backend._set_default_timeout(timedelta(seconds=timeout_s))
    return from_backend(backend, store=store, name=name)


def split(
    comm: Communicator,
    ranks: Sequence[int],
    *,
    kind: str | None = None,
    device: torch.device | str | None = None,
) -> Communicator | None:
    """Makes new connections among some of the communicator's ranks, in this order. Returns None on the other ranks.

    Collective over all ranks of `comm`, which must make their splits in the same order. Timeout, device and backend are
    those of `comm`, unless `kind` says gossamer, gloo or nccl, and `device` another. Errors call the ranks as `comm`
    does.

    Raises:
        ConfigError: a rank is not in the group or given twice, or the communicator has no store to meet in.
    """
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < comm.size for rank in ranks):
        raise ConfigError(
            f"comm.split: ranks must be different ones of 0 to {comm.size - 1}, got {list(ranks)}"
        )
    origin = origin_of(comm)
    origin.splits += 1
    if comm.rank not in ranks:
        return None
    name = f"{origin.name}/split{origin.splits}/{'-'.join(map(str, ranks))}"
    store = dist.PrefixStore(name, origin.store)
    kind = kind if kind is not None else origin.kind
    backend = make_backend(kind, store, ranks.index(comm.rank), len(ranks), origin.timeout)
    called = () if list(ranks) == list(range(comm.size)) else ranks
    place = comm.device if device is None else device
    return from_backend(backend, device=place, store=store, name=name, called=called)


def hosts_of(comm: Communicator) -> list[list[int]]:
    """Returns the ranks of each host: one kernel, network namespace and user, who can share memory. Collective."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    place = f"{boot} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    number = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest(), "big")
    hosts: dict[int, list[int]] = {}
    for rank, [where] in enumerate(gather_numbers(comm, number)):
        hosts.setdefault(where, []).append(rank)
    return list(hosts.values())


def gather_numbers(comm: Communicator, *numbers: int) -> list[list[int]]:
    """Returns the numbers of each rank, in rank order. All ranks give equally many. Collective."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=comm.device)
    every = mine.new_empty(comm.size, len(numbers))
    comm.all_gather(every.view(-1), mine).wait()
    return every.tolist()


def share_memory(comm: Communicator, control: Communicator, *, of_host: bool = False) -> Communicator:
    """Returns a communicator whose ranks, all on one host, read each other's memory. Collective.

    Args:
        comm: the ranks.
        control: the same ranks for CPU tensors. With of_host, over the backend "gossamer", and nothing else uses it.
        of_host: whether the memory is the host's, through which rows of a device's tensors travel.
    """
    origin = origin_of(control if of_host else comm)
    origin.splits += 1
    store = dist.PrefixStore(f"{origin.name}/memory{origin.splits}", origin.store)
    make = _C.host_memory_communicator if of_host else _C.symmetric_communicator
    own = make(comm, control, store, int(origin.timeout.total_seconds() * 1000))
    if comm in origins:
        origins[own] = origins[comm]
    if membership.member() is not None:
        own.wait_on_host(origin.timeout)
    return own


def origin_of(comm: Communicator) -> Origin:
    """Returns what a communicator was made of. Raises ConfigError if it was made without a store."""
    origin = origins.get(comm)
    if origin is None:
        raise ConfigError(
            "comm.split: this communicator was made without a store; give from_backend(store=...)"
        )
    return origin


def store_of(comm: Communicator, leaf: str) -> Any:
    """Returns a store of this communicator's ranks under the prefix `leaf`; None if it was made without a store."""
    origin = origins.get(comm)
    return None if origin is None else dist.PrefixStore(f"{origin.name}/{leaf}", origin.store)


def from_group(group: "ProcessGroup | None", device: torch.device | str = "cpu") -> Communicator:
    """Returns the communicator of a process group (None: the default group) for tensors on `device`.

    It is the same object for the same group and device type, so its byte counters continue.

    Raises:
        ConfigError: torch.distributed is not initialised, or the group has no backend for that device.
    """
    group = _resolve(group)
    known = _communicators.get(group)
    if known is not None and device in known:
        return known[device]
    known, kind = _communicators.setdefault(group, {}), torch.device(device).type
    if kind not in known:
        try:
            backend = group._get_backend(torch.device(kind))
        except RuntimeError as error:
            raise ConfigError(
                f"comm: the process group {group.group_name!r} has no backend for {kind} tensors; "
                f"initialise it with one, such as 'cpu:gloo,cuda:nccl'"
            ) from error
        if isinstance(backend, _C.CodecBackend) or own_kind(backend.name()) != backend.name():
            # Its sums are encoded, and a direct call chooses its own codec; or it is another backend over NCCL.
            known[kind], _ = private(group, torch.device(kind))
        else:
            if isinstance(backend, _C.GossamerBackend) and kind != "cpu":
                backend = backend.backend_of(torch.device(device))  # NCCL
            store = distributed_c10d._world.pg_map[group][1]
            known[kind] = from_backend(backend, device=device, store=store, name=group.group_name)
    known[device] = known[kind]
    return known[device]


def private(group: "ProcessGroup | None", device: torch.device) -> tuple[Communicator, Communicator]:
    """Makes connections between the ranks of `group` for one model: for tensors on `device`, and for CPU tensors.

    Collective over the group's ranks, which must make their calls in the same order. Both are the same communicator
    where `device` is the CPU. Backends and timeout are those of the group, with Gloo where it has no backend for the
    CPU. The connections end with the communicators.

    Raises:
        ConfigError: torch.distributed is not initialised; or the group's backend is not gossamer, Gloo or NCCL.
    """
    group = _resolve(group)
    # torch's new_group names a group by how many groups a process has. That may differ between ranks, and repeats after
    # a group has ended. So the backend is made here, under a name that counts up.
    _private_counts[group] = count = _private_counts.get(group, 0) + 1
    return private_among(group, range(dist.get_world_size(group)), device, key=str(count))


def private_among(
    group: "ProcessGroup | None", ranks: Sequence[int], device: torch.device, *, key: str
) -> tuple[Communicator, Communicator]:
    """Does private() for some ranks of a group, which alone call it. Collective over these ranks, in any order.

    Args:
        ranks: ranks of the group, this one among them, in the order of the communicators.
        key: a text by which the ranks meet: equal on them, and never used before in this group.
    """
    group = _resolve(group)
    ground = ground_of(group)

    def connect(device: torch.device, leaf: str) -> Communicator:
        name = f"gossamer/{key}/{leaf}"
        kind = own_kind(ground.kinds.get(device.type, "gloo" if device.type == "cpu" else "none"))
        store = dist.PrefixStore(name, ground.store)
        if kind not in KINDS_OF_BACKENDS:
            raise ConfigError(
                f"comm: the process group {group.group_name!r} uses the backend {kind!r} for {device.type} tensors; "
                f"gossamer, gloo, nccl and nccl2 are supported"
            )
        backend = make_backend(kind, store, ranks.index(ground.rank), len(ranks), ground.timeout)
        return from_backend(backend, device=device, store=store, name=name)

    control = connect(torch.device("cpu"), "control")
    return (control if device.type == "cpu" else connect(device, device.type)), control


@dataclass(frozen=True)
class Ground:
    """What is needed to make further connections between the ranks of a process group."""

    rank: int
    size: int
    kinds: dict[str, str]  # backends by device type
    store: Any
    timeout: timedelta


def ground_of(group: "ProcessGroup | None") -> Ground:
    """Returns the Ground of a process group; None is the default group, which must exist."""
    group = _resolve(group)
    kinds = distributed_c10d.BackendConfig(distributed_c10d.Backend(dist.get_backend_config(group)))
    return Ground(
        rank=dist.get_rank(group),
        size=dist.get_world_size(group),
        kinds={
            device: "nccl" if (device, kind) == ("cuda", "gossamer") else str(kind)
            for device, kind in kinds.get_device_backend_map().items()
        },
        store=distributed_c10d._world.pg_map[group][1],
        timeout=timeout_of(group),
    )


def timeout_of(group: "ProcessGroup") -> timedelta:
    """Returns how long one collective of the group may take."""
    return _timeout_of(group._get_backend(group._device_types[0]))


#: The backends of connections that this package makes.
KINDS_OF_BACKENDS = ("gossamer", "gloo", "nccl")


def own_kind(kind: str) -> str:
    """Returns the kind of connections that are made between the ranks of a group whose backend is of this kind.

    torch has several backends over NCCL, such as nccl2 from 2.14 on. The one for own connections is always nccl.
    """
    return "nccl" if kind in ("nccl2", "nccl-legacy", "nccl-lazy") else kind


def make_backend(kind: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Makes a backend object, of one of KINDS_OF_BACKENDS. Collective over the ranks that share the store.

    Raises:
        ConfigError: another kind.
    """
    if kind not in KINDS_OF_BACKENDS:
        raise ConfigError(f"comm: connections can be made over {', '.join(KINDS_OF_BACKENDS)}, got {kind!r}")
    if kind == "gossamer":
        return _C.GossamerBackend(store, rank, size, timeout)
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _timeout_of(backend: Any) -> timedelta:
    return getattr(backend.options, "_timeout", dist.constants.default_pg_timeout)


def _resolve(group: "ProcessGroup | None") -> "ProcessGroup":
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is not None:
        raise ConfigError(f"comm: group must be a ProcessGroup, a communicator or None, got {group!r}")
    late_entry.enter_now()
    world = dist.group.WORLD
    if world is None:
        raise ConfigError("comm: torch.distributed is not initialised; call gossamer.init() first")
    return world
