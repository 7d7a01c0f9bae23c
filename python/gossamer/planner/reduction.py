# The messages are those of csrc/collectives and csrc/route. planner/network.py and planner/speeds.py give their prices.
# Buckets are not known here. Callers: planner/messages.py.
"""The cost of an all-reduce: the group's own, the two-shot through a codec, or two levels by hosts."""

import math

import torch

from gossamer.codec import Codec, Identity
from gossamer.comm import goes_by_hosts
from gossamer.facts import Cost, Job
from gossamer.planner.network import Network, RankGroup, all_ranks, between_hosts
from gossamer.planner.speeds import Speeds

#: Rows in memory of the host go in so many pieces at most, of so many bytes at least: csrc/route/peers.cpp.
MOST_HOST_PIECES, LEAST_HOST_PIECE = 8, 1 << 20


class Reducer:
    """Prices all-reduces on a network.

    Args:
        flat: whether sums go in one level, whatever the network is.
    """

    def __init__(self, network: Network, speeds: Speeds, *, flat: bool = False) -> None:
        self.network = network
        self.speeds = speeds
        self.flat: bool = flat

    @property
    def by_hosts(self) -> bool:
        """Whether the model's communicator goes by hosts."""
        return goes_by_hosts(self.network.host_ranks) and not self.flat

    @property
    def chunks(self) -> int:
        """The number of parts of a sum. Each part is summed by another rank."""
        return self.network.carriers * self.network.hosts if self.by_hosts else self.network.ranks

    def takes_hosts(self, codec: Codec | None) -> bool:
        """Whether a sum goes in two levels. codec None: an exact sum, which on GPUs with peer access is NCCL's."""
        exact = self.speeds.device == "cpu" or self.speeds.through_host
        return self.by_hosts and (codec is not None or exact)

    def all_reduce(self, numel: int, dtype: torch.dtype, codec: Codec | None) -> Job:
        """Prices the sum of `numel` elements. codec None: an exact sum, in one level the all-reduce of the group."""
        if self.takes_hosts(codec):
            return self._by_hosts(numel, dtype, codec or Identity())
        group = all_ranks(self.network)
        if group.size == 1:
            return Job(Cost())
        if group.is_local and self.speeds.through_host and not self.flat:
            return self._through_host(group, numel, dtype, codec or Identity())
        if codec is None:
            nbytes = numel * dtype.itemsize
            return Job(group.all_reduce(nbytes), nbytes / self.speeds.memory)
        return self.in_one_level(group, numel, dtype, codec)

    def in_one_level(self, group: RankGroup, numel: int, dtype: torch.dtype, codec: Codec) -> Job:
        """Prices the two-shot between the ranks of a group."""
        if group.size == 1:
            return Job(Cost())
        cost, coding_s, row = self._two_shot(group, numel, dtype, codec)
        # Each piece but the first is encoded, summed and decoded while another piece travels.
        alone_s = coding_s / (1 if codec.gathers else group.pieces(row))
        return Job(cost, alone_s, beside_s=coding_s - alone_s)

    def scatter(self, group: RankGroup, part: int, dtype: torch.dtype, codec: Codec | None) -> Job:
        """Prices a reduce-scatter in which each rank gets the sum of `part` elements.

        codec None: a ring with NCCL. Gloo, which torch has for CPUs, makes it of an all-reduce.
        """
        if group.size == 1:
            return Job(Cost())
        if codec is None:
            nbytes = part * dtype.itemsize
            whole = group.size * nbytes
            cost = group.all_reduce(whole) if self.speeds.device == "cpu" else group.all_gather(nbytes)
            return Job(cost, (group.size - 1) * nbytes / self.speeds.memory)
        speed = self.speeds.of(codec)
        coding_s = 4 * part * group.size * (1 / speed.encode + 1 / speed.decode_add)
        return Job(group.all_to_all(codec.wire_bytes(part, dtype)), coding_s)

    def gather(self, group: RankGroup, part: int, dtype: torch.dtype, codec: Codec | None) -> Job:
        """Prices an all-gather of `part` elements of each rank. codec None: a ring of the elements themselves."""
        if group.size == 1:
            return Job(Cost())
        if codec is None:
            return Job(group.all_gather(part * dtype.itemsize))
        speed = self.speeds.of(codec)
        coding_s = 4 * part * (1 / speed.encode + group.size / speed.decode)
        return Job(group.all_gather(codec.wire_bytes(part, dtype)), coding_s)

    def _two_shot(
        self, group: RankGroup, numel: int, dtype: torch.dtype, codec: Codec
    ) -> tuple[Cost, float, int]:
        """Returns cost, seconds of computing and bytes of a row in csrc/collectives/two_shot.cpp.

        Or of the sum of gathered rows in collectives.py.
        """
        chunk = math.ceil(math.ceil(numel / group.size) / codec.block) * codec.block
        speed, float_bytes = self.speeds.of(codec), 4 * numel
        if codec.gathers:
            row = codec.wire_bytes(numel, dtype)
            coding_s = float_bytes * (1 / speed.encode + group.size / speed.decode_add)
            if codec.feeds_back:
                coding_s += float_bytes / speed.decode + 3 * float_bytes / self.speeds.memory
            return group.all_gather(row), coding_s, row
        row = codec.wire_bytes(chunk, dtype)
        coding_s = float_bytes / speed.encode + float_bytes / speed.decode
        coding_s += 4 * chunk * (group.size / speed.decode_add + 1 / speed.encode)
        if codec.feeds_back:  # one more decode, and three passes over memory
            coding_s += float_bytes / speed.decode + 3 * float_bytes / self.speeds.memory
        return group.all_to_all(row) + group.all_gather(row), coding_s, row

    def _through_host(self, group: RankGroup, numel: int, dtype: torch.dtype, codec: Codec) -> Job:
        """Prices csrc/route/peers.cpp through memory of the host.

        A GPU writes a row for each rank, reads as many, writes its result, and reads those of all. With pieces it
        writes beside the reads, but for the first piece. Codecs compute on the way.
        """
        network, n = self.network, group.size
        _, coding_s, row = self._two_shot(group, numel, dtype, codec)
        pieces = 1
        if codec.native is not None and codec.native.is_divisible:
            pieces = min(MOST_HOST_PIECES, math.ceil(n * row / LEAST_HOST_PIECE))
        moved = (3 * n + 1) * row if pieces == 1 else (2 + 1 / pieces) * n * row
        seconds = 2 * network.local_latency_s + moved / network.local_bandwidth
        return Job(Cost(seconds, 2 * (n - 1) * row), beside_s=coding_s)

    def _by_hosts(self, numel: int, dtype: torch.dtype, codec: Codec) -> Job:
        """Prices csrc/route/hosts.cpp: exact sums inside each host, the two-shot between hosts, and the way back.

        On CPUs a carrier reads and writes its host's memory piece by piece, while another piece travels. On GPUs NCCL
        sums inside the host first, and gathers at the end. Without peer access each GPU writes its tensor into memory
        of the host. A carrier reads its part of all of them, and writes the result, which the others read.
        """
        network, carriers = self.network, self.network.carriers
        group = between_hosts(network)
        part = -(-numel // (carriers * codec.block)) * codec.block
        cost, coding_s, row = self._two_shot(group, part, dtype, codec)
        part_bytes = part * dtype.itemsize
        inside = 2 * (network.per_host - 1) * part_bytes
        if self.speeds.device == "cpu":
            beside_s, before_s = coding_s + (inside + part_bytes) / self.speeds.memory, 0.0
        else:
            through = numel * dtype.itemsize + (network.per_host + carriers) * part_bytes
            moved = through if self.speeds.through_host else inside
            beside_s, before_s = coding_s, moved / network.local_bandwidth
        alone_s = beside_s / group.pieces(row)
        waiting_s = 2 * network.local_latency_s
        return Job(cost, before_s + alone_s + waiting_s, beside_s=beside_s - alone_s, inside=inside)
