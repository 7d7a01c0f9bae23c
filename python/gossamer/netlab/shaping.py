# How a link of a given rate is imitated: the numbers of a token bucket, and the commands of tc and ip that set one up.
# It runs nothing; hosts.py does, in both directions of every host's cable.
"""The token bucket that keeps a link to its rate."""

from dataclasses import dataclass

from gossamer.units import parse_rate

_LEAST_BURST, _LARGEST_PACKET, _FRAME = 16_384, 65_536, 1_514
_BURST_S, _QUEUE_S = 0.001, 0.05


@dataclass(frozen=True)
class Shape:
    """One direction of a link: `rate` as in "100mbit" (gossamer.units).

    The bucket holds 1 ms of the link (at least 16 KiB): what a host has not sent it may send at once later, and with
    more of that a whole message of few bits would pass at no cost. Packets that the kernel has not cut into frames yet
    are kept below the bucket, or tbf would cut each of them, and every second frame would be acknowledged.

    The queue holds 50 ms, which is about what a switch has for a port of 100 Mbit/s (some hundred KiB). Several hosts
    that send to one fill it, and then lose packets, as they would there; a longer queue would let one bulk transfer
    delay every small message by its length.
    """

    rate: str

    @property
    def burst_bytes(self) -> int:
        return max(_LEAST_BURST, int(parse_rate(self.rate) * _BURST_S))

    @property
    def packet_bytes(self) -> int:
        """The largest packet given to the device."""
        return min(_LARGEST_PACKET, self.burst_bytes - _FRAME)

    def qdisc(self, device: str) -> list[str]:
        """Arguments of tc."""
        bits = f"{8 * parse_rate(self.rate):.0f}bit"
        bucket = ["tbf", "rate", bits, "burst", str(self.burst_bytes), "latency", f"{_QUEUE_S * 1000:g}ms"]
        return ["qdisc", "replace", "dev", device, "root", *bucket]

    def packets(self, device: str) -> list[str]:
        """Arguments of ip."""
        size = str(self.packet_bytes)
        return ["link", "set", "dev", device, "gso_max_size", size]
