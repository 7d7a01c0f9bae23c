# What the kernel has counted on a network interface, read in the caller's network namespace, or through hosts.py in
# another one.
"""Bytes and packets that an interface has sent and received."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import ConfigError

_NAMES = ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets", "tx_dropped")
HEADERS = 14 + 20 + 32  # bytes of a packet's headers: Ethernet, IPv4, TCP with time stamps


@dataclass(frozen=True)
class Counters:
    """Counts since the interface was made. The difference of two is what was sent and received between them.

    A packet is what the kernel has handed to the device, and may be several frames.
    """

    tx_bytes: int
    tx_packets: int
    rx_bytes: int
    rx_packets: int
    tx_dropped: int

    @classmethod
    def read(
        cls, device: str, text: Callable[[str], str] = lambda path: Path(path).read_text()
    ) -> "Counters":
        """Reads the counters in this process's network. `text` reads a file in another network.

        Raises:
            ConfigError: there is no such device.
        """
        folder = f"/sys/class/net/{device}/statistics"
        try:
            return cls(*(int(text(f"{folder}/{name}")) for name in _NAMES))
        except OSError as error:
            raise ConfigError(
                f"counters of {device}: there is no such network interface here ({error})"
            ) from error

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(getattr(self, name) - getattr(other, name) for name in _NAMES))

    @property
    def payload_sent(self) -> int:
        """tx_bytes without the headers of Ethernet, IP and TCP of each packet."""
        return self.tx_bytes - HEADERS * self.tx_packets
