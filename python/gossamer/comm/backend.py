"""The c10d backend "gossamer" under torch.distributed's own names.

After ``import gossamer``, ``init_process_group("gossamer")``, ``"cpu:gossamer,cuda:nccl"`` and
``new_group(backend="gossamer")`` work as with "gloo": CPU tensors go through shared memory between the ranks
of a host, and through Gloo between hosts. With gossamer.Options as `pg_options`, sums and gathers go through a codec.
The backend itself is native (csrc/backend, csrc/encoded). torch 2.15 finds it without the import, by the entry point
"torch.distributed.backends" in pyproject.toml.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossamer import _C
from gossamer._C import Communicator
from gossamer.comm.c10d import from_backend, make_backend
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
        return _C.CodecBackend(*place, given, connect_codec)
    # Other ranks may have options that fit. All of them learn of it before this one raises.
    backend = _C.GossamerBackend(*place, "" if given is None else repr(given))
    if given is not None:
        raise ConfigError(f"gossamer backend: pg_options must be a gossamer.Options or None, got {given!r}")
    return backend


def connect_codec(
    store: Any, rank: int, size: int, timeout: timedelta, hosts: Sequence[Sequence[int]] | None
) -> Communicator:
    """Makes the connections on which a group's encoded rows travel. Collective."""
    comm = from_backend(make_backend(NAME, store, rank, size, timeout), store=store, name="codec")
    return connect_by_hosts(Hierarchical(hosts=hosts) if hosts is not None else None, comm, comm)
