"""The c10d backend "gossamer" under torch.distributed's own names.

After ``import gossamer``, ``init_process_group("gossamer")``, ``"cpu:gossamer,cuda:nccl"`` and
``new_group(backend="gossamer")`` work as with "gloo": CPU tensors go through shared memory between the ranks
of a host, and through Gloo between hosts. With gossamer.Options as `pg_options`, sums and gathers go through a codec.
``"cpu:gossamer,cuda:gossamer"`` takes CUDA tensors too: NCCL does what is not encoded.
The backend itself is native (csrc/backend, csrc/encoded). torch 2.15 finds it without the import, by the entry point
"torch.distributed.backends" in pyproject.toml.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossamer import _C
from gossamer._C import Communicator
from gossamer.comm.c10d import from_backend, make_backend, split
from gossamer.comm.hierarchical import Hierarchical, connect_by_hosts
from gossamer.errors import ConfigError

NAME = "gossamer"


def register() -> None:
    """Registers the backend with torch.distributed, when gossamer is imported or torch looks for it. Idempotent."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, given: Any) -> Any:
    timeout = timedelta(seconds=options.timeout.total_seconds())
    place = (options.store, options.group_rank, options.group_size, timeout)
    if isinstance(given, _C.CodecOptions):
        return _with_cuda(_C.CodecBackend(*place, given, connect_codec))
    # Other ranks may have options that fit. All of them learn of it before this one raises.
    backend = _C.GossamerBackend(*place, "" if given is None else repr(given))
    if given is not None:
        raise ConfigError(f"gossamer backend: pg_options must be a gossamer.Options or None, got {given!r}")
    return _with_cuda(backend)


def _with_cuda(backend: _C.GossamerBackend) -> _C.GossamerBackend:
    # torch gives "cuda:gossamer" and "cpu:gossamer" one object. Nothing of NCCL is made before the first CUDA tensor.
    if torch.cuda.is_available():
        backend.connect_elsewhere("cuda", _connect_nccl)
    return backend


def _connect_nccl(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    return make_backend("nccl", store, rank, size, timeout)


def connect_codec(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    hosts: Sequence[Sequence[int]] | None,
    device: torch.device,
) -> Communicator:
    """Makes the connections on which the encoded rows of a group's tensors on `device` travel. Collective."""
    shared = make_backend(NAME, store, rank, size, timeout)
    control = from_backend(shared, store=store, name="codec")
    if len(shared.hosts) == size > 1:
        # No ranks share a host, so there is Gloo alone, over which rows go in pieces where the link is slow.
        control = split(control, range(size), kind="gloo") or control
    comm = control
    if device.type != "cpu":
        own = dist.PrefixStore(device.type, store)
        backend = make_backend("nccl", own, rank, size, timeout)
        comm = from_backend(backend, device=device, store=own, name="codec")
    return connect_by_hosts(Hierarchical(hosts=hosts) if hosts is not None else None, comm, control)
