"""A group seen as hosts: ranks that are close to each other, and the slow hop between them.

`Hierarchical` is what a user passes as process_group; `Hierarchy` is the communicator that a model then gets. Sums go
inside a host first; then every local rank carries its shard across, so all network cards work; then the shards are
gathered inside the host. A codec is used on the way across only. Used by collectives.py.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer import _C
from gossamer.comm.base import Communicator, Work
from gossamer.comm.c10d import hosts_of, split
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class Hierarchical:
    """DataParallel(process_group=Hierarchical()): gradients are compressed between hosts, and exact inside one.

    Args:
        group: a process group, a communicator, or None for the default group.
        hosts: the ranks of each host. None: those that can share memory, which they find out by trying. Give it for
            other islands, such as racks.
    """

    group: "ProcessGroup | Communicator | None" = None
    hosts: Sequence[Sequence[int]] | None = None


class Hierarchy:
    """A communicator with two levels; every operation but the sums of collectives.py goes through `world`.

    Args:
        world: all ranks.
        intra: the ranks of this host.
        inter: the ranks that carry the same shard on every host; None where this rank carries none.
        hosts: the ranks of each host. As many ranks of each carry a shard as the smallest host has.
    """

    def __init__(
        self, world: Communicator, intra: Communicator, inter: Communicator | None, hosts: list[list[int]]
    ) -> None:
        self.world, self.intra, self.inter, self.hosts = world, intra, inter, hosts
        self.carriers = min(len(host) for host in hosts)
        self.rank, self.size, self.device = world.rank, world.size, world.device

    @property
    def bytes_sent(self) -> int:
        """Of all levels."""
        return self.world.bytes_sent + self.intra.bytes_sent + self.bytes_across

    @property
    def bytes_received(self) -> int:
        """The same for what has come in."""
        across = self.inter.bytes_received if self.inter is not None else 0
        return self.world.bytes_received + self.intra.bytes_received + across

    @property
    def bytes_across(self) -> int:
        """Payload bytes that this rank has sent to other hosts by its shards."""
        return self.inter.bytes_sent if self.inter is not None else 0

    def all_reduce(self, x: Tensor) -> Work:
        return self.world.all_reduce(x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        return self.world.reduce_scatter(out, x)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self.world.all_gather(out, x)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self.world.all_to_all(out, x)

    def broadcast(self, x: Tensor, source: int = 0) -> Work:
        return self.world.broadcast(x, source)

    def exchange(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        return self.world.exchange(out, x, to, source)

    def exchange_all(self, swaps: Sequence[tuple[Tensor, Tensor, int, int]]) -> Work:
        return self.world.exchange_all(swaps)

    def allocate(self, nbytes: int) -> Tensor:
        return self.world.allocate(nbytes)

    def announce_failure(self) -> None:
        for comm in (self.world, self.intra, self.inter):
            if comm is not None:
                comm.announce_failure()

    # --- the two steps inside a host, around the one across ---

    def sum_of_host(self, x: Tensor) -> Tensor:
        """x [numel], numel divisible by `carriers` -> this rank's shard of the sum over its host; x is scratch then.

        A rank that carries no shard gets one of 0 elements.
        """
        shards = x.view(self.carriers, -1)
        if self.intra.size == self.carriers:
            own = torch.empty_like(shards[0])
            self.intra.reduce_scatter(own, x).wait()
            return own
        self.intra.all_reduce(x).wait()
        return shards[self.intra.rank] if self.intra.rank < self.carriers else x[:0]

    def spread_in_host(self, shard: Tensor, x: Tensor) -> None:
        """The shards of all carriers of this host -> x [numel], on every rank of it."""
        if self.intra.size == self.carriers:
            self.intra.all_gather(x, shard.contiguous()).wait()
            return
        shards = x.view(self.carriers, -1)
        if self.intra.rank < self.carriers:
            shards[self.intra.rank].copy_(shard)
        for carrier in range(self.carriers):
            self.intra.broadcast(shards[carrier], carrier).wait()


def world_of(comm: Communicator) -> Communicator:
    """The communicator itself, or all ranks of a Hierarchy."""
    return comm.world if isinstance(comm, Hierarchy) else comm


def is_communicator(group: object) -> bool:
    """True for a communicator, false for a process group, a Hierarchical or None."""
    return isinstance(group, (_C.Communicator, Hierarchy))


def hierarchy(world: Communicator, hosts: Sequence[Sequence[int]] | None = None) -> Hierarchy:
    """The communicator as hosts and the hop between them: see comm/hierarchical.py. Collective.

    `hosts`: the ranks of each; None: those that can map each other's memory.
    """
    lists = _checked(hosts if hosts is not None else hosts_of(world), world.size)
    _require_alike(world, lists)
    carriers = min(len(host) for host in lists)
    parts = [split(world, host) for host in lists]
    intra = next(part for part in parts if part is not None)
    across = [split(world, [host[carrier] for host in lists]) for carrier in range(carriers)]
    inter = next((part for part in across if part is not None), None)
    return Hierarchy(world, intra, inter, lists)


def duplicate(comm: Communicator) -> Communicator:
    """New connections among the same ranks. Collective, as split."""
    if isinstance(comm, Hierarchy):
        return hierarchy(duplicate(comm.world), comm.hosts)
    own = split(comm, range(comm.size))
    assert own is not None
    return own


def _require_alike(world: Communicator, hosts: list[list[int]]) -> None:
    mine = torch.tensor([zlib.crc32(str(hosts).encode())], device=world.device)
    every = mine.new_empty(world.size)
    world.all_gather(every, mine).wait()
    different = (every != every[0]).nonzero().flatten().tolist()
    if different:
        raise ConfigError(
            f"Hierarchical: hosts must be the same on all ranks; those of {different} differ from rank 0's"
        )


def _checked(hosts: Any, size: int) -> list[list[int]]:
    """ConfigError unless every rank of the group is in exactly one of the hosts."""
    lists = [list(host) for host in hosts]
    if sorted(rank for host in lists for rank in host) != list(range(size)) or not all(lists):
        raise ConfigError(
            f"Hierarchical: hosts must name each of the ranks 0 to {size - 1} once, got {lists}"
        )
    return lists
