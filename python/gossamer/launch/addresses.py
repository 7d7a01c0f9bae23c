# Network addresses of this host: of its devices, of its own name, on the way to a peer, and as ssh shows them. Judges
# nothing, except that choose_device() picks the device for Gloo. Used by agent.py, elastic/ and gossamer/doctor.
"""Network addresses of this host."""

import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915  # of linux/sockios.h


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
