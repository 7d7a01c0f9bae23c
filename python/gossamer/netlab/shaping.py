# How a link of a given rate is imitated: the numbers of a token bucket, and the arguments of tc and ip that set it up.
# hosts.py runs these commands in both directions of every host's cable.
"""The token bucket that keeps a link to its rate."""

from dataclasses import dataclass

from gossamer.units import parse_rate

_LEAST_BURST, _LARGEST_PACKET, _FRAME = 16_384, 65_536, 1_514
_BURST_S, _QUEUE_S = 0.001, 0.05


@dataclass(frozen=True)
class Shape:
    """One direction of a link with a rate such as "100mbit" (gossamer.units).

    The bucket holds 1 ms of the link, and at least 16 KiB. A host may later send at once what it has not sent. So
    with a larger bucket a small message would cost nothing. Packets that the kernel has not cut into frames yet stay
    smaller than the bucket. Otherwise tbf would cut each of them, and every second frame would be acknowledged.

    The queue holds 50 ms, about as much as a switch has for a port of 100 Mbit/s (some hundred KiB). If several hosts
    send to one host they fill its queue and lose packets, as they would at a switch. A longer queue would let one bulk
    transfer delay every small message.
    """

    rate: str

    @property
    def burst_bytes(self) -> int:
        return max(_LEAST_BURST, int(parse_rate(self.rate) * _BURST_S))

    @property
    def packet_bytes(self) -> int:
        """The largest packet that is given to the device."""
        return min(_LARGEST_PACKET, self.burst_bytes - _FRAME)

    def qdisc(self, device: str) -> list[str]:
        """Returns the arguments of tc that set up the bucket."""
        bits = f"{8 * parse_rate(self.rate):.0f}bit"
        bucket = ["tbf", "rate", bits, "burst", str(self.burst_bytes), "latency", f"{_QUEUE_S * 1000:g}ms"]
        return ["qdisc", "replace", "dev", device, "root", *bucket]

    def packets(self, device: str) -> list[str]:
        """Returns the arguments of ip that limit the size of packets."""
        size = str(self.packet_bytes)
        return ["link", "set", "dev", device, "gso_max_size", size]
