"""Topologies that a formula gives: all, ring, shift-one, one-peer exponential."""

from gossamer.errors import ConfigError
from gossamer.topology.base import IDLE, Exchange, Mixing, Topology, check


class All(Topology):
    """Every rank takes the mean of all, in one round, by an all-reduce."""

    uniform = True

    def period(self, size: int) -> int:
        check(self, size=size)
        return 1

    def mixing(self, step: int, size: int, rank: int) -> Mixing:
        """Raises ConfigError: an all-reduce is not made of the exchanges of a Mixing."""
        raise ConfigError(f"{self!r}: has no exchanges (uniform is True); take the mean by an all-reduce")


class Ring(Topology):
    """A third from either neighbour and a third of one's own; halves between 2 ranks."""

    def period(self, size: int) -> int:
        check(self, size=size)
        return 1

    def mixing(self, step: int, size: int, rank: int) -> Mixing:
        check(self, step=step, size=size, rank=rank)
        if size == 1:
            return IDLE
        right, left = (rank + 1) % size, (rank - 1) % size
        if right == left:  # the only other rank: one message, not two
            return Mixing(0.5, (Exchange(right, left, 0.5),))
        return Mixing(1 / 3, (Exchange(right, left, 1 / 3), Exchange(left, right, 1 / 3)))


class ShiftOne(Topology):
    """Pairs that average with halves; the partner changes every round.

    Even size: Bagua's "shift_one". Ranks of the lower half pair with ranks of the upper half only, one further
    each round. Odd size, which Bagua refuses: a round-robin tournament. In round s the pairs are those with
    rank + partner = s (mod size); one rank is idle; every two ranks meet once in a period.
    """

    def period(self, size: int) -> int:
        check(self, size=size)
        return size if size % 2 else size // 2

    def mixing(self, step: int, size: int, rank: int) -> Mixing:
        check(self, step=step, size=size, rank=rank)
        half = size // 2
        if size % 2:
            partner = (step - rank) % size
        elif rank < half:
            partner = half + (step + rank) % half
        else:
            partner = (rank - half - step) % half
        return IDLE if partner == rank else Mixing(0.5, (Exchange(partner, partner, 0.5),))


class OnePeerExponential(Topology):
    """Half from the rank that lies 1, 2, 4, ... below, to the one as far above, with the distance doubling each round.

    If size is a power of two, all ranks hold the exact mean after log2(size) rounds; otherwise they only approach
    it. Source: Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training", NeurIPS 2021.
    """

    def period(self, size: int) -> int:
        check(self, size=size)
        return max(1, (size - 1).bit_length())

    def mixing(self, step: int, size: int, rank: int) -> Mixing:
        check(self, step=step, size=size, rank=rank)
        if size == 1:
            return IDLE
        distance = 1 << step % self.period(size)
        return Mixing(0.5, (Exchange((rank + distance) % size, (rank - distance) % size, 0.5),))
