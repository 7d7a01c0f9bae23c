# A cable that takes time, where the kernel may lack netem. hosts.py starts it in the namespace of the bridge, as a
# program by its path, so that it does not import torch; it ends when that namespace's processes are ended.
"""Carries packets between two devices (TAP), each a given time after it came: distance.py SECONDS NEAR FAR"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TAP, _BARE_PACKETS = 0x400454CA, 0x0002, 0x1000
_LONGEST = 1 << 16  # bytes of a packet


def open_device(name: str) -> int:
    """Makes a TAP device, which is there as long as this process, and returns its file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _TAP | _BARE_PACKETS))
    return device


def carry(first: int, second: int, delay_s: float) -> None:
    """Carries packets in both directions, without an end. What a device cannot take is lost, as on a cable."""
    other = {first: second, second: first}
    underway: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout = max(0.0, underway[0][0] - time.monotonic()) if underway else None
        for device in select.select([first, second], [], [], timeout)[0]:
            underway.append((time.monotonic() + delay_s, other[device], os.read(device, _LONGEST)))
        while underway and underway[0][0] <= time.monotonic():
            _, device, packet = underway.popleft()
            try:
                os.write(device, packet)
            except OSError:
                continue  # the device is down


if __name__ == "__main__":
    near, far = (open_device(name) for name in sys.argv[2:4])
    print("ready", flush=True)
    carry(near, far, float(sys.argv[1]))
