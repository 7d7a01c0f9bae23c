# What a collective costs on a network of hosts: seconds, bytes that a rank sends, bytes that leave a host.
# The alpha-beta model of docs/planner.md, one formula for each collective. No model, bucket or algorithm is known here.
# Callers: planner/messages.py and planner/reduction.py.
"""Hosts, the links between them, and the cost of collectives on them."""

import itertools
import math
from dataclasses import dataclass, replace

from gossamer.errors import ConfigError
from gossamer.facts import Cost

#: As csrc/route paces rows: below this bandwidth those of more bytes than that go in pieces, of so many seconds, but
#: not below or above these bytes.
SLOW, LONG_ROW, MOST_PIECES = 3e8, 64 << 10, 32
PIECE_S, LEAST_PIECE, LARGEST_PIECE = 3e-3, 32 << 10, 256 << 10
#: Of an Ethernet frame of 1514 bytes, which is what a link's rate counts, so much is data of TCP.
TCP_SHARE = 1448 / 1514


@dataclass(frozen=True)
class Network:
    """`ranks` on `hosts`, in blocks: rank 0 and those after it are on the first host. As equal as they can be.

    Args:
        bandwidth: bytes per second that leave a host; as many may come in at the same time.
        latency_s: from one host to another, of a small message.
        local_bandwidth: bytes per second from a rank to the others of its host.
        local_latency_s: inside a host.
        message_s: time of a rank for each message that it sends, beside the latency.
        payload: share of the bandwidths that data gets; the rest is headers. 1 for a measured bandwidth.

    Raises:
        ConfigError: a number that is not positive, or more hosts than ranks.
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
        """Ranks of the fullest host."""
        return -(-self.ranks // self.hosts)

    @property
    def carriers(self) -> int:
        """Ranks of the emptiest host: so many of each carry a shard to the others, where ranks go by hosts."""
        return self.ranks // self.hosts

    @property
    def host_ranks(self) -> list[range]:
        """The ranks of each host; the first hosts have one more where the ranks are not divisible."""
        more = self.ranks % self.hosts
        starts = [host * self.carriers + min(host, more) for host in range(self.hosts + 1)]
        return [range(begin, end) for begin, end in itertools.pairwise(starts)]

    def at(self, bandwidth: float) -> "Network":
        """The same with another bandwidth between hosts."""
        return replace(self, bandwidth=bandwidth)

    def of(self, ranks: int) -> "Network":
        """The same with other ranks, as many on each host as now, at most."""
        return replace(self, ranks=ranks, hosts=-(-ranks // self.per_host))


@dataclass(frozen=True)
class RankGroup:
    """`size` ranks, `per_host` of them on each of their hosts; `sharing` such groups use the links at once."""

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
        """Of a row of so many bytes."""
        if self.is_local or self.network.bandwidth >= SLOW or row <= LONG_ROW:
            return 1
        piece = min(max(PIECE_S * self.network.bandwidth, LEAST_PIECE), LARGEST_PIECE)
        return min(MOST_PIECES, math.ceil(row / piece))

    def takes_turns(self, peers: float, pieces: int = 1) -> float:
        """Times as long as the bytes alone: on a slow link Gloo's all-to-all sends a connection's directions in turns.

        Of `peers` connections all but the last have another one's direction beside them, so 1 / peers is added. Rows in
        pieces are messages of their own, and use both directions.
        """
        if self.is_local or self.network.bandwidth >= SLOW or peers == 0 or pieces > 1:
            return 1.0
        return 1 + 1 / peers

    def moving_s(self, *, across: float, local: float) -> float:
        """Seconds for bytes that leave a host, of all groups, and those that a rank sends inside one: side by side."""
        network = self.network
        beyond = 0.0 if self.is_local else across / (network.bandwidth * network.payload)
        return max(beyond, local / network.local_bandwidth)

    def all_reduce(self, count: int) -> Cost:
        """A ring over `count` bytes: 2 (n-1) messages of count / n, each after the one before."""
        n, part = self.size, count / self.size
        if n == 1:
            return Cost()
        across = 0.0 if self.is_local else part * self.sharing
        local = part if self.per_host > 1 else 0.0
        step_s = self.latency_s + self.moving_s(across=across, local=local)
        return Cost(2 * (n - 1) * step_s, 2 * count * (n - 1) // n, 2 * (n - 1) * across)

    def all_to_all(self, row: int) -> Cost:
        """A row to every other rank, all at once."""
        n, here = self.size, min(self.per_host, self.size)
        if n == 1:
            return Cost()
        across = here * (n - here) * row * self.sharing
        seconds = self.latency_s + (n - 2) * self.network.message_s
        turns = self.takes_turns(n - 1, self.pieces(row))
        seconds += self.moving_s(across=across * turns, local=(here - 1) * row)
        return Cost(seconds, (n - 1) * row, across)

    def all_gather(self, row: int) -> Cost:
        """A ring over one row a rank: n-1 messages of a row, each after the one before."""
        n = self.size
        if n == 1:
            return Cost()
        across = 0.0 if self.is_local else row * self.sharing
        step_s = self.latency_s + self.moving_s(across=across, local=row if self.per_host > 1 else 0.0)
        return Cost((n - 1) * step_s, (n - 1) * row, (n - 1) * across)

    def exchange(self, count: int, *, messages: float, crossing: float) -> Cost:
        """`messages` of `count` bytes from every rank, and as many to it; `crossing` of them leave a host."""
        if messages == 0:
            return Cost()
        across = crossing * count * self.sharing
        latency_s = self.network.latency_s if crossing else self.network.local_latency_s
        seconds = latency_s + messages * self.network.message_s
        local = (messages - crossing / self.per_host) * count
        moving_s = self.moving_s(across=across, local=max(0.0, local))
        return Cost(seconds + moving_s, messages * count, across)


def all_ranks(network: Network) -> RankGroup:
    """In one level."""
    return RankGroup(network, network.ranks, network.per_host if network.hosts > 1 else network.ranks)


def between_hosts(network: Network) -> RankGroup:
    """The ranks that carry one shard, one on each host. As many such groups as there are shards share the links."""
    return RankGroup(network, network.hosts, 1, sharing=network.carriers)
