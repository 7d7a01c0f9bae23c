"""Communicators: moving bytes between ranks, and nothing else."""

from gossamer.comm.base import Communicator, Work
from gossamer.comm.c10d import destroy_group, from_backend, from_group, is_communicator, private_group

__all__ = [
    "Communicator",
    "Work",
    "destroy_group",
    "from_backend",
    "from_group",
    "is_communicator",
    "private_group",
]
