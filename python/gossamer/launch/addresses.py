# Network addresses of this host: of its devices, of its own name, on the way to a peer, as ssh shows them, and those
# that something listens on. Judges nothing, except that choose_device() picks the device for Gloo. Used by agent.py,
# elastic/ and gossamer/doctor.
"""Network addresses of this host."""

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

SIOCGIFADDR = 0x8915  # of linux/sockios.h
LISTEN = "0A"  # a state of linux/tcp_states.h, as /proc/net/tcp writes it


class Listener(NamedTuple):
    """A TCP socket that takes connections. The address 0.0.0.0 or :: stands for all addresses of the host."""

    address: str
    port: int
    inode: str  # as os.readlink() shows it in /proc/PID/fd: socket:[inode]


def request(code: int, device: str) -> bytes | None:
    """Returns the kernel's answer to an ioctl about a network device, or None if the kernel refuses."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, code, struct.pack("256s", device.encode()[:15]))
        except OSError:
            return None


def of_device(device: str) -> str | None:
    """Returns the IPv4 address of a network device, or None if it has none."""
    answer = request(SIOCGIFADDR, device)
    return socket.inet_ntoa(answer[20:24]) if answer else None


def of_own_name() -> list[str]:
    """Returns the addresses of this host's name, in the order in which Gloo tries them."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def of_host() -> list[str]:
    """Returns the addresses of this host's devices, IPv4 and IPv6."""
    names = [name for _, name in socket.if_nameindex()]
    found = [address for address in map(of_device, names) if address]
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in lines]
    return found


def listeners() -> list[Listener]:
    """Returns the TCP sockets that listen on this host, of all processes and users."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTEN:
                    number, port = local.split(":")
                    # Each word of 32 bits is written as a number of this machine.
                    words = struct.unpack(f">{len(number) // 8}I", bytes.fromhex(number))
                    address = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                    found.append(Listener(address, int(port, 16), inode))
    return found


def towards(peer: str) -> str | None:
    """Returns this host's address on the way to a peer, or None if there is no way. Nothing is sent."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def seen_by_ssh() -> tuple[str | None, str | None]:
    """Returns the address of the machine that started this process over ssh and that of this one; None without ssh."""
    seen = os.environ.get("SSH_CONNECTION", "").split()
    client, _port, server, _port = seen if len(seen) == 4 else [None] * 4
    return client, server


def choose_device(master: str) -> None:
    """Sets GLOO_SOCKET_IFNAME to the device that leads to ``master``, if Gloo would choose a loopback address.

    Gloo takes the first address of this host's name. If that is a loopback address, no other host reaches it.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if (own := of_own_name()) and not own[0].startswith(("127.", "::1")):
        return
    address = towards(master)
    if address is None or address.startswith("127."):
        return
    for _, name in socket.if_nameindex():
        if of_device(name) == address:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return
