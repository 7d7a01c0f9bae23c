"""Topologies with a formula: all, ring, shift-one, one-peer exponential, random pairs."""

import random
from functools import lru_cache

from gossamer.errors import ConfigError
from gossamer.topology.base import IDLE, Exchange, Mixing, Topology, check, is_int

_RANDOM_ROUNDS = 1024  # drawn differently; then they repeat


class All(Topology):
    """Every rank takes the mean of all, in one round, by an all-reduce."""

    uniform = True

    def period(self, size: int) -> int:
        check(self, size=size)
        return 1

    def mixing(self, step: int, size: int, rank: int) -> Mixing:
        """Raises ConfigError, because an all-reduce has no exchanges."""
        raise ConfigError(f"{self!r}: has no exchanges (uniform is True); take the mean by an all-reduce")


class Ring(Topology):
    """Every rank takes a third of its own value and a third from either neighbour. Two ranks take halves."""

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
    """Ranks average in pairs, half and half. The partner changes every round.

    With an even size it is Bagua's "shift_one": a rank of the lower half pairs with a rank of the upper half, one
    further each round. With an odd size, which Bagua refuses, it is a round-robin tournament: in round s the pairs have
    rank + partner = s (mod size), one rank is idle, and every two ranks meet once in a period.
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
    """Every rank takes half from the rank 1, 2, 4, ... below it. The distance doubles each round.

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


class RandomPairs(Topology):
    """Ranks average in pairs, half and half. Every round draws the pairs at random; with an odd size one rank is idle.

    All ranks draw the same pairs, from `seed` and the round's number. The schedule repeats after 1,024 rounds. Source:
    NoLoCo, Kolehmainen et al. 2025, arXiv:2506.10911.
    """

    def __init__(self, seed: int = 0) -> None:
        if not is_int(seed):
            raise ConfigError(f"RandomPairs: seed must be an int, got {seed!r}")
        self.seed: int = seed

    def period(self, size: int) -> int:
        check(self, size=size)
        return _RANDOM_ROUNDS if size > 2 else 1

    def mixing(self, step: int, size: int, rank: int) -> Mixing:
        check(self, step=step, size=size, rank=rank)
        partner = _drawn_partners(self.seed, step % self.period(size), size)[rank]
        return IDLE if partner == rank else Mixing(0.5, (Exchange(partner, partner, 0.5),))


@lru_cache(maxsize=64)
def _drawn_partners(seed: int, step: int, size: int) -> list[int]:
    """Returns each rank's partner in a round. An idle rank's partner is itself."""
    order = list(range(size))
    random.Random(f"{seed} {step}").shuffle(
        order
    )  # a text as seed is hashed, so near numbers give unlike pairs
    partners = list(range(size))
    for first, second in zip(order[::2], order[1::2], strict=False):
        partners[first], partners[second] = second, first
    return partners
