"""``open_named()``: collectives that are matched by name, not by order, for some ranks of a group.

It opens private connections between the ranks. The negotiation and small sums go through shared memory on one host, and
the negotiation through Gloo between hosts; sums of CPU tensors go by hosts. The Horovod face submits operations to the
object that it returns (csrc/named); csrc/negotiate matches and fuses them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gossamer import _C
from gossamer._C import Communicator
from gossamer.comm.c10d import KINDS_OF_BACKENDS, from_backend, ground_of, make_backend, own_kind
from gossamer.comm.hierarchical import by_hosts, goes_by_hosts
from gossamer.errors import ConfigError
from gossamer.observe.stall import NamedWatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_open: "WeakKeyDictionary[_C.NamedCollectives, _Connections]" = WeakKeyDictionary()
SILENCE = timedelta(days=365)  # an idle rank sends nothing; a lost rank is noticed in other ways


@dataclass(frozen=True)
class NamedOptions:
    """How operations are negotiated. In fields marked "rank 0", the value of the set's first rank counts."""

    fusion_bytes: int = 128 << 20  # rank 0: of the largest fused batch; 0: only groups are fused
    fuse_groups: bool = True  # rank 0: whether groups may be fused with other operations
    cache_capacity: int = 1024  # rank 0: how many agreements are kept, which then need no request; 0: none
    window_us: int = 400  # how long to wait for more operations while a burst grows; 0: not at all
    # rank 0: an operation that some ranks have not submitted is reported after this; 0: never
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0  # rank 0: such an operation ends all operations after this; 0: never
    # rank 0: whether sums go by hosts where there are several; None: as goes_by_hosts() says
    by_hosts: bool | None = None
    # Called on rank 0's worker thread; must be short. None: all ranks log a warning.
    on_stall: Callable[[list[_C.Stalled]], None] | None = None
    # Called with phase, name, rank and seconds, from any thread.
    on_event: Callable[[str, str, int, float], None] | None = None


@dataclass(frozen=True)
class _Connections:
    backends: list[Any]
    devices: "dict[str, Communicator]"
    by_hosts: bool


def open_named(
    group: "ProcessGroup | None", ranks: Sequence[int], *, key: str, options: NamedOptions | None = None
) -> _C.NamedCollectives:
    """Opens the named operations of some ranks of a group, over connections of their own. Collective over these ranks.

    Args:
        group: a process group; None is the default group.
        ranks: ranks of the group in ascending order, this one among them. Other ranks do not call.
        key: equal on these ranks, and never used before in this group.
        options: None is NamedOptions().

    Raises:
        ConfigError: this rank is not in `ranks`, they are not ascending, or a backend is not gossamer, gloo or nccl.
        CommError: the other ranks did not call within the group's timeout.
    """
    ground = ground_of(group)
    members = list(ranks)
    if members != sorted(set(members)) or ground.rank not in members or not members[-1] < ground.size:
        raise ConfigError(
            f"open_named: ranks must be ascending ranks of a group of {ground.size}, rank {ground.rank} among "
            f"them, got {members}"
        )
    rank, size = members.index(ground.rank), len(members)
    store = dist.PrefixStore(f"gossamer/named/{key}", ground.store)

    def connect(kind: str, name: str, timeout: timedelta) -> Any:
        return make_backend(kind, dist.PrefixStore(name, store), rank, size, timeout)

    settings = vars(options or NamedOptions()).copy()
    control = shared = connect("gossamer", "shared", ground.timeout)
    if len(shared.hosts) > 1:
        control = connect("gloo", "control", SILENCE)
    wanted, two_levels = settings.pop("by_hosts"), False
    if len(shared.hosts) > 1:  # as the first rank of the set wants
        if rank == 0:
            store.set("by_hosts", str(goes_by_hosts(shared.hosts) if wanted is None else wanted))
        two_levels = store.get("by_hosts") == b"True"
    devices: dict[str, Communicator] = {}
    backends: dict[str, Any] = {"gossamer": shared}
    for device, kind in ground.kinds.items():
        if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            continue
        kind = own_kind(kind)
        if kind not in KINDS_OF_BACKENDS:
            raise ConfigError(
                f"open_named: the group uses {kind!r} for {device} tensors; use gossamer, gloo or nccl"
            )
        if kind not in backends:
            backends[kind] = connect(kind, kind, ground.timeout)
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        comm = from_backend(backends[kind], device=place, store=store, name=f"{key}/{device}")
        if two_levels and device == "cpu":
            comm, _ = by_hosts(comm, comm, shared.hosts, shared.hosts)
        devices[device] = comm
    far = len(shared.hosts) == 1 and ground.kinds.get("cpu", "gossamer") != "gossamer"
    near = from_backend(shared, store=store, name=f"{key}/near") if far else None
    if settings["on_stall"] is None:
        warning_s = settings["stall_warning_s"]
        watch = NamedWatch(ground.rank, leads=rank == 0, store=store, warning_s=warning_s if size > 1 else 0)
        settings["on_stall"] = watch.report  # keeps the watch alive
    named = _C.NamedCollectives(control, devices, members, near=near, **settings)
    _open[named] = _Connections(list(backends.values()), devices, two_levels)
    return named


def sums_by_hosts(named: _C.NamedCollectives) -> bool:
    """Returns whether sums of these ranks go by hosts, as open_named() has decided for all of them."""
    return _open[named].by_hosts


def abort_all() -> None:
    """Ends all open operations, with an error for every wait, because a rank is lost.

    A rank on another host that is not exchanging data with the lost one would not notice the loss by itself.
    """
    for named, connections in list(_open.items()):
        for backend in connections.backends:
            backend.abort()
        for comm in connections.devices.values():
            if isinstance(comm, _C.ByHosts):
                comm.announce_failure("learned that a rank is lost")
        named.shutdown()
