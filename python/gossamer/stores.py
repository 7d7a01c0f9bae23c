"""Serves torch's store on one address. torch's own server listens on every address of the host, and asks nobody who
they are. mpi.py and launch/ use it."""

import socket
from typing import Any

import torch.distributed as dist


def serve(address: str, port: int = 0, **options: Any) -> dist.TCPStore:
    """Returns a TCPStore that listens on one address of this host, and nowhere else.

    A name, and an address that this host does not have itself (a router may forward the port), do not say where to
    listen. The store then listens on every address, as torch's does.

    Args:
        address: by which clients reach the store; numbers, or the name of a host.
        port: 0 for a free one.
        options: more arguments of TCPStore.
    """
    try:
        kind, numbers = socket.SOCK_STREAM, socket.AI_NUMERICHOST
        family, _, _, _, place = socket.getaddrinfo(address, port, type=kind, flags=numbers)[0]
        listener = socket.create_server(place, family=family)
    except OSError:
        return dist.TCPStore(address, port, is_master=True, **options)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, master_listen_fd=listener.detach(), **options)
