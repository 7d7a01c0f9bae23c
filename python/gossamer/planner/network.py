# The alpha-beta model of docs/planner.md, with one formula for each collective. Models, buckets and algorithms are not
# known here. Callers: planner/messages.py and planner/reduction.py.
"""Hosts, the links between them, and the cost of collectives on them."""

import itertools
import math
from dataclasses import dataclass, replace

from gossamer.errors import ConfigError
from gossamer.facts import Cost

#: How csrc/route paces rows: below SLOW bytes per second, rows of more than LONG_ROW bytes go in at most MOST_PIECES
#: pieces. A piece takes PIECE_S seconds, and has LEAST_PIECE to LARGEST_PIECE bytes.
SLOW, LONG_ROW, MOST_PIECES = 3e8, 64 << 10, 32
PIECE_S, LEAST_PIECE, LARGEST_PIECE = 3e-3, 32 << 10, 256 << 10
#: The share of TCP's data in an Ethernet frame of 1514 bytes. A link's rate counts the whole frame.
TCP_SHARE = 1448 / 1514


@dataclass(frozen=True)
class Network:
    """`ranks` on `hosts`, in blocks: the first host has rank 0 and the next ones. Blocks are as equal as possible.

    Args:
        bandwidth: bytes per second that leave a host. As many may come in at the same time.
        latency_s: seconds of a small message from one host to another.
        local_bandwidth: bytes per second from a rank to the others of its host.
        local_latency_s: seconds of a small message inside a host.
        message_s: a rank's own seconds for each message that it sends, besides the latency.
        payload: the share of the bandwidth between hosts that is data and not headers. 1 for a measured bandwidth.

    Raises:
        ConfigError: a number is not positive, or there are more hosts than ranks.
    """

    ranks: int
    hosts: int = 1
    bandwidth: float = 1.25e9
    latency_s: float = 50e-6
    local_bandwidth: float = 25e9
    local_latency_s: float = 5e-6
    message_s: float = 2e-6
    payload: float = TCP_SHARE

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 and math.isfinite(value)) and not (name == "bandwidth" and value == math.inf):
                raise ConfigError(f"Network: {name} must be above 0, got {value!r}")
        if self.hosts > self.ranks:
            raise ConfigError(f"Network: hosts must be at most {self.ranks} ranks, got {self.hosts}")

    @property
    def per_host(self) -> int:
        """The number of ranks of the fullest host."""
        return -(-self.ranks // self.hosts)

    @property
    def carriers(self) -> int:
        """The ranks of the emptiest host. Where sums go by hosts, so many ranks of each host carry a shard."""
        return self.ranks // self.hosts

    @property
    def host_ranks(self) -> list[range]:
        """The ranks of each host; the first hosts have one more where the ranks are not divisible."""
        more = self.ranks % self.hosts
        starts = [host * self.carriers + min(host, more) for host in range(self.hosts + 1)]
        return [range(begin, end) for begin, end in itertools.pairwise(starts)]

    def at(self, bandwidth: float) -> "Network":
        """The same network with another bandwidth between hosts."""
        return replace(self, bandwidth=bandwidth)

    def of(self, ranks: int) -> "Network":
        """The same network with another number of ranks, and at most as many on each host as now."""
        return replace(self, ranks=ranks, hosts=-(-ranks // self.per_host))


@dataclass(frozen=True)
class RankGroup:
    """`size` ranks, `per_host` of them on each host. `sharing` such groups use the links at the same time."""

    network: Network
    size: int
    per_host: int
    sharing: int = 1

    @property
    def is_local(self) -> bool:
        return self.per_host >= self.size

    @property
    def latency_s(self) -> float:
        network = self.network
        return (network.local_latency_s if self.is_local else network.latency_s) + network.message_s

    def pieces(self, row: float) -> int:
        """The number of pieces of a row of so many bytes."""
        if self.is_local or self.network.bandwidth >= SLOW or row <= LONG_ROW:
            return 1
        piece = min(max(PIECE_S * self.network.bandwidth, LEAST_PIECE), LARGEST_PIECE)
        return min(MOST_PIECES, math.ceil(row / piece))

    def takes_turns(self, peers: float, pieces: int = 1) -> float:
        """Returns the time of an all-to-all over that of its bytes alone.

        On a slow link Gloo sends the two directions of a connection in turns. All `peers` connections but the last
        overlap with a direction of another one, so 1 / peers is added. Pieces of rows are messages of their own, and
        use both directions.
        """
        if self.is_local or self.network.bandwidth >= SLOW or peers == 0 or pieces > 1:
            return 1.0
        return 1 + 1 / peers

    def moving_s(self, *, across: float, local: float) -> float:
        """Seconds to move `across` bytes of all groups out of a host while each rank sends `local` bytes inside it."""
        network = self.network
        beyond = 0.0 if self.is_local else across / (network.bandwidth * network.payload)
        return max(beyond, local / network.local_bandwidth)

    def all_reduce(self, count: int) -> Cost:
        """Prices a ring over `count` bytes: 2 (n-1) messages of count / n bytes, one after the other."""
        messages = 2 * (self.size - 1)
        return self._ring(messages, count / self.size, sent=messages * count // self.size)

    def all_gather(self, row: int) -> Cost:
        """Prices a ring over one row of `row` bytes for each rank: n-1 messages of a row, one after the other."""
        return self._ring(self.size - 1, row, sent=(self.size - 1) * row)

    def _ring(self, messages: int, nbytes: float, *, sent: int) -> Cost:
        if self.size == 1:
            return Cost()
        across = 0.0 if self.is_local else nbytes * self.sharing
        local = nbytes if self.per_host > 1 else 0.0
        step_s = self.latency_s + self.moving_s(across=across, local=local)
        return Cost(messages * step_s, sent, messages * across)

    def all_to_all(self, row: int) -> Cost:
        """Prices a row of `row` bytes to every other rank, all at the same time."""
        n, here = self.size, min(self.per_host, self.size)
        if n == 1:
            return Cost()
        across = here * (n - here) * row * self.sharing
        seconds = self.latency_s + (n - 2) * self.network.message_s
        turns = self.takes_turns(n - 1, self.pieces(row))
        seconds += self.moving_s(across=across * turns, local=(here - 1) * row)
        return Cost(seconds, (n - 1) * row, across)

    def exchange(self, count: int, *, messages: float, crossing: float) -> Cost:
        """Prices `messages` of `count` bytes from every rank and as many to it. `crossing` of them leave a host."""
        if messages == 0:
            return Cost()
        across = crossing * count * self.sharing
        latency_s = self.network.latency_s if crossing else self.network.local_latency_s
        seconds = latency_s + messages * self.network.message_s
        local = (messages - crossing / self.per_host) * count
        moving_s = self.moving_s(across=across, local=max(0.0, local))
        return Cost(seconds + moving_s, messages * count, across)


def all_ranks(network: Network) -> RankGroup:
    """Returns the group of all ranks, for sums in one level."""
    return RankGroup(network, network.ranks, network.per_host if network.hosts > 1 else network.ranks)


def between_hosts(network: Network) -> RankGroup:
    """Returns a group with one rank on each host, which carries one shard. The shards' groups share the links."""
    return RankGroup(network, network.hosts, 1, sharing=network.carriers)
