"""Serves torch's store on one address, and notices its silence.

torch's own server listens on every address of the host, and asks nobody who they are. mpi.py, launch/ and membership.py
use it.
"""

import contextlib
import os
import socket
import stat
from typing import Any

import torch.distributed as dist

from gossamer.errors import ConfigError


def serve(address: str, port: int = 0, **options: Any) -> dist.TCPStore:
    """Returns a TCPStore that listens on one address of this host, and nowhere else.

    A name, and an address that this host does not have itself (a router may forward the port), do not say where to
    listen. The store then listens on every address, as torch's does.

    Args:
        address: by which clients reach the store; numbers, or the name of a host.
        port: 0 for a free one.
        options: more arguments of TCPStore.

    Raises:
        ConfigError: this host cannot reach the address, which it has itself.
    """
    try:
        kind, numbers = socket.SOCK_STREAM, socket.AI_NUMERICHOST
        family, _, _, _, place = socket.getaddrinfo(address, port, type=kind, flags=numbers)[0]
        listener = socket.create_server(place, family=family)
    except OSError:
        return dist.TCPStore(address, port, is_master=True, **options)
    port = listener.getsockname()[1]
    _require_reachable(family, address, port)
    return dist.TCPStore(address, port, is_master=True, master_listen_fd=listener.detach(), **options)


def _require_reachable(family: int, address: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # asks for a route, and sends nothing
        except OSError as error:
            raise ConfigError(
                f"this host must reach its own address {address}, got {error.strerror}; in a container or a network "
                f"namespace without the device lo: ip link set lo up"
            ) from error


def fail_when_silent(address: str, port: int, *, after_s: int) -> None:
    """Lets this process's connections to a store fail once its host has been silent for some seconds.

    torch sets no limit: where a network is cut without a word, a client waits for a quarter of an hour.

    Args:
        address, port: of the store; the address in numbers.
        after_s: whole seconds, at least 3.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=int(name))
            try:
                place = connection.getpeername()
                if connection.type != socket.SOCK_STREAM or not isinstance(place, tuple):
                    continue
                if (place[0].removeprefix("::ffff:"), place[1]) != (address, port):
                    continue
                tcp = socket.IPPROTO_TCP
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(tcp, socket.TCP_KEEPIDLE, after_s // 3)
                connection.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, after_s // 6))
                connection.setsockopt(tcp, socket.TCP_KEEPCNT, 4)
                connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, after_s * 1000)
            finally:
                connection.detach()  # it stays its owner's
