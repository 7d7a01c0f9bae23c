"""The base-(k+1) graph: the exact mean of any number of ranks in finitely many rounds of at most k peers.

A schedule is a list of rounds; a round is a list of groups of ranks that exchange. `largest` is k + 1 everywhere: the
size of the largest group in which each rank averages with each. Weights are exact fractions until the last line.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gossamer.errors import ConfigError
from gossamer.topology.base import Exchange, Mixing, Topology, check, is_int


class BaseGraph(Topology):
    """The base-(k+1) graph: the exact mean after one period, for every size, with at most k peers a round.

    From a step that is not a multiple of the period, it takes less than two periods. Source: Takezawa, Sato, Bao, Niwa,
    Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized Learning via Finite-time
    Convergence", NeurIPS 2023, algorithms 1 to 3.

    Args:
        k: the most peers that a rank has in one round.
    """

    def __init__(self, k: int = 1) -> None:
        if not is_int(k) or k < 1:
            raise ConfigError(f"BaseGraph: k, the peers of a rank in a round, must be an int >= 1, got {k!r}")
        self.k = k

    def period(self, size: int) -> int:
        check(self, size=size)
        return len(_base_graph(size, self.k + 1))

    def mixing(self, step: int, size: int, rank: int) -> Mixing:
        check(self, step=step, size=size, rank=rank)
        rounds = _base_graph(size, self.k + 1)
        return rounds[step % len(rounds)][rank]


class _Group(NamedTuple):
    """Ranks that exchange in a round, all with one weight: each with each, or (star) the first with all others."""

    ranks: Sequence[int]
    weight: Fraction
    star: bool = False

    def messages(self) -> Iterator[tuple[int, int, int]]:
        """Yields (rank, to, source) of every exchange. The exchanges of one rank come in its order."""
        first, *others = self.ranks
        if self.star:
            for other in others:
                yield first, other, other
                yield other, first, first
            return
        # All send `shift` places up at the same time. That is a permutation, so nobody waits in a circle.
        for shift in range(1, len(self.ranks)):
            for place, rank in enumerate(self.ranks):
                yield rank, self.ranks[(place + shift) % len(self.ranks)], self.ranks[place - shift]


_Round = list[_Group]


@lru_cache(maxsize=16)
def _base_graph(size: int, largest: int) -> tuple[tuple[Mixing, ...], ...]:
    """Returns every rank's Mixing in every round, by algorithm 3, or by algorithm 2 where that takes fewer rounds.

    Algorithm 3 finds the greatest divisor `smooth` of size without prime factors above `largest`. Each block of
    size / smooth ranks finds its mean. Then the ranks at the same place in all blocks find the mean of those means.
    """
    ranks = range(size)
    divisors = (divisor for divisor in range(1, size + 1) if size % divisor == 0)
    smooth = max(divisor for divisor in divisors if _factors(divisor, largest) is not None)
    width = size // smooth
    within = [_simple(ranks[start : start + width], largest) for start in range(0, size, width)]
    across = [_hyper_hypercube(ranks[place::width], largest) for place in range(width)]
    rounds = min(_parallel(within) + _parallel(across), _simple(ranks, largest), key=len)
    return tuple(_mixings(groups, size) for groups in rounds or [[]])


def _simple(ranks: Sequence[int], largest: int) -> list[_Round]:
    """Algorithm 2. The digits of the number of ranks in base `largest` cut the ranks into blocks, the longest first.

    1. Every block finds its own mean. 2. In round i of the second phase, every rank of the blocks after block i
    exchanges with one rank of each part of block i. The weight gives each part, and the blocks after block i, the mean
    of all of them. 3. Every part finds its own mean. Phases 2 and 3 of different blocks overlap.
    """
    if _factors(len(ranks), largest) is not None:
        return _hyper_hypercube(ranks, largest)
    blocks = _blocks(ranks, largest)
    wholes = [[rank for part in block for rank in part] for block in blocks]
    first = [_hyper_hypercube(whole, largest) for whole in wholes]
    third = [_parallel([_hyper_hypercube(part, largest) for part in block]) for block in blocks]
    if not third[-1]:  # its parts are single ranks, which may average with each other
        third[-1] = first[-1]

    # A block that is done before the longest one goes on averaging. That costs no round, and training moves the
    # values of its ranks less far apart.
    rounds = [
        [group for schedule in first for group in _cyclic(schedule, turn)] for turn in range(len(first[0]))
    ]
    for turn in range(len(third[0]) + 1):
        groups: _Round = []
        if turn < len(blocks) - 1:
            groups += _spread(blocks[turn], [rank for whole in wholes[turn + 1 :] for rank in whole], largest)
        for index, schedule in enumerate(third):
            begin = min(index + 1, len(blocks) - 1)  # the last block has no second phase of its own
            if turn >= begin:
                groups += _cyclic(schedule, turn - begin)
        rounds.append(groups)
    return rounds


def _blocks(ranks: Sequence[int], largest: int) -> list[list[Sequence[int]]]:
    """Cuts the ranks into blocks of at most `largest` - 1 parts, all of one length, a power of `largest`."""
    power = 1
    while power * largest <= len(ranks):
        power *= largest
    blocks, start = [], 0
    while start < len(ranks):
        end = start + (len(ranks) - start) // power * power
        if end > start:
            blocks.append([ranks[place : place + power] for place in range(start, end, power)])
        start, power = end, power // largest
    return blocks


def _spread(block: list[Sequence[int]], rest: list[int], largest: int) -> _Round:
    """A round of phase 2. It brings the mean of `rest` into every part of `block`, and the block's into the rest.

    Let N be the ranks of block and rest. A part of p ranks that hold m gets w * len(rest) * (mean(rest) - m) added to
    its sum. That must be p * len(rest) / N * (mean(rest) - m), so w = p / N.
    """
    part = len(block[0])
    weight = Fraction(part, len(block) * part + len(rest))
    stars = [
        _Group([rank, *(ranks[place] for ranks in block)], weight, star=True)
        for place, rank in enumerate(rest)
    ]
    free = [rank for ranks in block for rank in ranks[len(rest) :]]
    return stars + [_clique(free[place : place + largest]) for place in range(0, len(free), largest)]


def _hyper_hypercube(ranks: Sequence[int], largest: int) -> list[_Round]:
    """Algorithm 1. Places are numbers of mixed base; round i averages ranks whose places differ in digit i only."""
    rounds, stride = [], 1
    for factor in _factors(len(ranks), largest) or ():
        starts = [place for place in range(len(ranks)) if place // stride % factor == 0]
        rounds.append([_clique(ranks[start : start + stride * factor : stride]) for start in starts])
        stride *= factor
    return rounds


@lru_cache(maxsize=1024)
def _factors(number: int, largest: int) -> tuple[int, ...] | None:
    """Returns the fewest factors from 2 to `largest` whose product is `number`. None if a prime factor is greater."""
    if number == 1:
        return ()
    divisors = (factor for factor in range(min(number, largest), 1, -1) if number % factor == 0)
    splits = ((factor, _factors(number // factor, largest)) for factor in divisors)
    found = [(factor, *rest) for factor, rest in splits if rest is not None]
    return min(found, key=len, default=None)


def _clique(ranks: Sequence[int]) -> _Group:
    return _Group(ranks, Fraction(1, len(ranks)))


def _parallel(schedules: list[list[_Round]]) -> list[_Round]:
    """Runs schedules of equal length at the same time. They share no rank."""
    return [[group for groups in turn for group in groups] for turn in zip(*schedules, strict=True)]


def _cyclic(schedule: list[_Round], turn: int) -> _Round:
    return schedule[turn % len(schedule)] if schedule else []


def _mixings(groups: _Round, size: int) -> tuple[Mixing, ...]:
    """Returns every rank's Mixing in a round of groups that share no rank."""
    exchanges: list[list[Exchange]] = [[] for _ in range(size)]
    own = [Fraction(1)] * size
    for group in groups:
        for rank, to, source in group.messages():
            exchanges[rank].append(Exchange(to, source, float(group.weight)))
            own[rank] -= group.weight
    return tuple(Mixing(float(own[rank]), tuple(exchanges[rank])) for rank in range(size))
