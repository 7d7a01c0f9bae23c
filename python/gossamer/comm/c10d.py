"""Communicators over torch.distributed's process groups; the only file that looks inside them.

A model gets a private copy of the user's group, so that its traffic never interleaves with the user's own
collectives. Direct calls (gossamer.collectives) use the group they are given.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gossamer import _C
from gossamer.comm.base import Communicator
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_communicators: "WeakKeyDictionary[ProcessGroup, dict[str, Communicator]]" = WeakKeyDictionary()


def is_communicator(group: object) -> bool:
    """True for a communicator, false for a process group or None."""
    return isinstance(group, _C.Communicator)


def from_backend(
    backend: Any, *, device: torch.device | str = "cpu", store: Any = None, name: str = "backend"
) -> Communicator:
    """A communicator over one c10d backend object, such as a ProcessGroupGloo. No default group is needed.

    Args:
        backend: the c10d backend of this rank.
        device: where its tensors live.
        store: a c10d store for the roll call after a failure; None if there is none.
        name: equal on all ranks of this group, different for two groups that share a store.
    """
    return _C.c10d_communicator(backend, torch.device(device), store, name)


def from_group(group: "ProcessGroup | None", device: torch.device | str = "cpu") -> Communicator:
    """The communicator of a process group (None: the default group) for tensors on `device`.

    The same object for the same group and device type, so its byte counter goes on.

    Raises:
        ConfigError: torch.distributed is not initialised, or the group has no backend for that device.
    """
    group = _resolve(group)
    device = torch.device(device)
    known = _communicators.setdefault(group, {})
    if device.type not in known:
        try:
            backend = group._get_backend(torch.device(device.type))
        except RuntimeError as error:
            raise ConfigError(
                f"comm: the process group {group.group_name!r} has no backend for {device.type} tensors; "
                f"initialise it with one, such as 'cpu:gloo,cuda:nccl'"
            ) from error
        store = distributed_c10d._world.pg_map[group][1]
        known[device.type] = from_backend(backend, device=device, store=store, name=group.group_name)
    return known[device.type]


def private_group(group: "ProcessGroup | None", timeout_s: float) -> "ProcessGroup":
    """A new group of the same ranks with a backend for CPU tensors as well. Collective over those ranks."""
    group = _resolve(group)
    backends = dist.get_backend_config(group)
    if "cpu:" not in backends:
        backends = f"cpu:gloo,{backends}"
    created = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=timeout_s),
        backend=backends,
        use_local_synchronization=True,
    )
    assert not isinstance(created, int)  # new_group returns a placeholder only to ranks outside the list
    return created


def destroy_group(group: "ProcessGroup") -> None:
    """Ends a private group, unless torch.distributed was shut down before."""
    if dist.is_initialized() and group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def _resolve(group: "ProcessGroup | None") -> "ProcessGroup":
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"comm: group must be a ProcessGroup, a communicator or None, got {group!r}")
    if group is None and not dist.is_initialized():
        raise ConfigError("comm: torch.distributed is not initialised; call gossamer.init() first")
    return group if group is not None else dist.group.WORLD
