"""Communicators: moving bytes between ranks, and nothing else."""

from gossamer._C import Communicator
from gossamer._C import Pending as Work
from gossamer.comm.backend import register as register_backend
from gossamer.comm.c10d import (
    from_backend,
    from_group,
    private,
    private_among,
    split,
    store_of,
    timeout_of,
)
from gossamer.comm.hierarchical import (
    Flat,
    Hierarchical,
    connect_by_hosts,
    direct_group,
    duplicate,
    given_group,
    goes_by_hosts,
    hierarchy,
    is_communicator,
    layout_text,
    way_of,
)
from gossamer.comm.named import NamedOptions, open_named, sums_by_hosts
from gossamer.comm.symmetric import MAX_RANKS, Symmetric, symmetric

__all__ = [
    "MAX_RANKS",
    "Communicator",
    "Flat",
    "Hierarchical",
    "NamedOptions",
    "Symmetric",
    "Work",
    "connect_by_hosts",
    "direct_group",
    "duplicate",
    "from_backend",
    "from_group",
    "given_group",
    "goes_by_hosts",
    "hierarchy",
    "is_communicator",
    "layout_text",
    "open_named",
    "private",
    "private_among",
    "register_backend",
    "split",
    "store_of",
    "sums_by_hosts",
    "symmetric",
    "timeout_of",
    "way_of",
]
