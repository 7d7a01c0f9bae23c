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

__all__ = [
    "Communicator",
    "Hierarchical",
    "Hierarchy",
    "Work",
    "duplicate",
    "from_backend",
    "from_group",
    "hierarchy",
    "is_communicator",
    "private",
    "register_backend",
    "split",
    "timeout_of",
    "world_of",
]
