"""Communicators: moving bytes between ranks, and nothing else."""

from gossamer.comm.backend import register as register_backend
from gossamer.comm.base import Communicator, Work
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
    Hierarchical,
    Hierarchy,
    duplicate,
    hierarchy,
    is_communicator,
    world_of,
)
from gossamer.comm.named import NamedOptions, open_named
from gossamer.comm.symmetric import MAX_RANKS, Symmetric, symmetric

__all__ = [
    "MAX_RANKS",
    "Communicator",
    "Hierarchical",
    "Hierarchy",
    "NamedOptions",
    "Symmetric",
    "Work",
    "duplicate",
    "from_backend",
    "from_group",
    "hierarchy",
    "is_communicator",
    "open_named",
    "private",
    "private_among",
    "register_backend",
    "split",
    "store_of",
    "symmetric",
    "timeout_of",
    "world_of",
]
