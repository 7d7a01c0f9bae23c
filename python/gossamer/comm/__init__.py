"""Communicators: moving bytes between ranks, and nothing else."""

from gossamer.comm.backend import register as register_backend
from gossamer.comm.base import Communicator, Work
from gossamer.comm.c10d import from_backend, from_group, is_communicator, private, timeout_of

__all__ = [
    "Communicator",
    "Work",
    "from_backend",
    "from_group",
    "is_communicator",
    "private",
    "register_backend",
    "timeout_of",
]
