"""Communicators: moving bytes between ranks, and nothing else."""

from gossamer.comm.backend import register as register_backend
from gossamer.comm.base import Communicator, Work
from gossamer.comm.c10d import from_backend, from_group, private, split, timeout_of
from gossamer.comm.hierarchical import (
    Hierarchical,
    Hierarchy,
    duplicate,
    hierarchy,
    is_communicator,
    world_of,
)
from gossamer.comm.symmetric import MAX_RANKS, Symmetric, symmetric

__all__ = [
    "MAX_RANKS",
    "Communicator",
    "Hierarchical",
    "Hierarchy",
    "Symmetric",
    "Work",
    "duplicate",
    "from_backend",
    "from_group",
    "hierarchy",
    "is_communicator",
    "private",
    "register_backend",
    "split",
    "symmetric",
    "timeout_of",
    "world_of",
]
